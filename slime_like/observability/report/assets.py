"""Style sheet and script of the report page. Kept apart from data: nothing a run says is ever put into them."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1c1e21; --soft: #62676d; --rule: #d9dce0; --panel: #f6f7f9; --hot: #d55e00; --accent: #0072b2;
  --series-0: #0072b2; --series-1: #d55e00;
  --wait: #8d9299; --generate: #3f9bd0; --reward: #d9a400; --score: #a5579a; --train: #0a8a63; --sync: #cf5300;
  --orchestration: #333;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --ink: #e4e6e9; --soft: #9aa0a7; --rule: #33373d; --panel: #1d2024; --hot: #e8762c;
    --accent: #6cb8ea; --series-0: #6cb8ea; --series-1: #f0904d; --orchestration: #d7d9dc;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 1.2rem 1.2rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Noto Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: .4rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--rule); padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .3rem 0 .8rem; }
.soft, figcaption span { color: var(--soft); font-size: .86rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: .8rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--panel); padding: .8rem; overflow: auto; font-size: .84rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--panel); border-radius: 6px; padding: .7rem .8rem .4rem; min-width: 0; }
figcaption { display: flex; flex-direction: column; }
svg { display: block; width: 100%; height: auto; }
.readout { min-height: 1.4em; font-size: .84rem; font-variant-numeric: tabular-nums; color: var(--soft); }
.key { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin: 0 .35em 0 .9em; }
.key:first-child { margin-left: 0; }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { stroke: var(--soft); }
.tick { fill: var(--soft); font-size: 11px; }
.cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
polyline { fill: none; stroke-width: 2.6; stroke-linejoin: round; }
polyline.series-1 { stroke-width: 1.3; } polyline.faint { stroke-width: 1; opacity: .45; }
.non-finite, .cut { fill: var(--hot); }
polyline.series-0 { stroke: var(--series-0); } circle.series-0 { fill: var(--series-0); }
polyline.series-1 { stroke: var(--series-1); } circle.series-1 { fill: var(--series-1); }
.key.series-0 { background: var(--series-0); } .key.series-1 { background: var(--series-1); }
rect.part-wait { fill: var(--wait); } rect.part-generate { fill: var(--generate); }
rect.part-reward { fill: var(--reward); } rect.part-score { fill: var(--score); }
rect.part-train { fill: var(--train); } rect.part-sync { fill: var(--sync); }
rect.part-orchestration { fill: var(--orchestration); }
.key.part-wait { background: var(--wait); } .key.part-generate { background: var(--generate); }
.key.part-reward { background: var(--reward); } .key.part-score { background: var(--score); }
.key.part-train { background: var(--train); } .key.part-sync { background: var(--sync); }
.key.part-orchestration { background: var(--orchestration); }
.tools { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center; margin: .5rem 0; }
input, select, button { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--rule);
  border-radius: 4px; padding: .15rem .5rem; max-width: 100%; }
button { cursor: pointer; } button:hover, button:focus-visible { border-color: var(--accent); color: var(--accent); }
.scroll { overflow: auto; max-height: 34rem; border: 1px solid var(--rule); border-radius: 6px; }
table { border-collapse: collapse; font-size: .84rem; width: 100%; }
th { position: sticky; top: 0; background: var(--panel); text-align: left; vertical-align: bottom; z-index: 1; }
th button { border: 0; background: none; font-weight: 600; text-align: left; padding: .35rem .5rem; width: 100%; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
td { border-top: 1px solid var(--rule); padding: .3rem .5rem; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.none { color: var(--soft); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; overflow: auto; max-height: 9rem; unicode-bidi: isolate; }
.text.long { min-width: 16rem; max-width: 34rem; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
#tokens { background: var(--panel); border-radius: 6px; padding: .7rem; line-height: 2; max-height: 24rem;
  overflow: auto; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.token { border: 1px solid var(--rule); border-radius: 3px; padding: .05rem .2rem; margin: 0 1px; cursor: default;
  white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.token, .shade { background: color-mix(in srgb, var(--hot) calc(var(--level, 0) * 85%), var(--paper)); }
.token.none { border-style: dotted; } .token.masked { opacity: .5; text-decoration: line-through; }
.token:hover, .token.chosen { outline: 2px solid var(--accent); }
.shade { display: inline-block; padding: 0 .5rem; border: 1px solid var(--rule); }
"""

SCRIPT = r"""
"use strict";
(() => {
  const data = (id) => JSON.parse(document.getElementById(id).textContent);
  const make = (name, text, kind) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const short = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : String(value));

  // Curves: the values at the step under the pointer.
  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low;
  };
  data("chart-data").forEach((chart, index) => {
    const figure = document.getElementById("chart-" + index);
    const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
    const readout = figure.querySelector(".readout"), legend = [...readout.childNodes];
    const place = (step) =>
      chart.left + ((step - chart.low) / (chart.high - chart.low)) * (chart.right - chart.left);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const across = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const wanted = chart.low + ((across - chart.left) / (chart.right - chart.left)) * (chart.high - chart.low);
      const found = chart.lines.filter((line) => line.steps.length).map((line) => {
        const at = nearest(line.steps, wanted);
        return { label: line.label, step: line.steps[at], value: line.values[at] };
      });
      if (!found.length) return;
      cursor.setAttribute("x1", place(found[0].step));
      cursor.setAttribute("x2", place(found[0].step));
      const figures = found.map((point) => point.label + " " + short(point.value));
      readout.textContent = "step " + found[0].step + ": " + figures.join(", ");
    });
    svg.addEventListener("pointerleave", () => {
      cursor.setAttribute("x1", -9);
      cursor.setAttribute("x2", -9);
      readout.replaceChildren(...legend);
    });
  });

  // Tables: sort by a column (empty cells last either way), filter by text.
  const compare = (first, second) => {
    const left = first.dataset.value, right = second.dataset.value;
    if (left !== undefined && right !== undefined) return Number(left) - Number(right);
    return first.textContent.localeCompare(second.textContent);
  };
  const sortBy = (table, column) => {
    const header = table.tHead.rows[0].cells[column];
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const empty = (row) => row.cells[column].classList.contains("none");
    const rows = [...table.tBodies[0].rows].sort((first, second) => {
      if (empty(first) || empty(second)) return empty(first) - empty(second);
      const order = compare(first.cells[column], second.cells[column]);
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  };
  const makeSortable = (table) => {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = make("button", cell.textContent);
      button.type = "button";
      button.addEventListener("click", () => sortBy(table, column));
      cell.replaceChildren(button);
    });
  };
  for (const section of document.querySelectorAll(".table")) {
    const table = section.querySelector("table"), input = section.querySelector("input");
    const shown = section.querySelector(".shown"), rows = [...table.tBodies[0].rows];
    makeSortable(table);
    const filter = () => {
      const wanted = input.value.toLowerCase();
      let count = 0;
      for (const row of rows) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
        count += row.hidden ? 0 : 1;
      }
      shown.textContent = count + " of " + rows.length + " rows";
    };
    input.addEventListener("input", filter);
    filter();
  }

  // One sample's tokens, shaded by a logprob gap.
  const tokenData = data("token-data");
  if (tokenData.samples.length) {
    const column = (name) => tokenData.columns.indexOf(name);
    const choice = document.getElementById("sample"), shade = document.getElementById("shade");
    const strip = document.getElementById("tokens"), details = document.getElementById("token-details");
    const note = document.getElementById("sample-note");
    // Gaps on a logarithmic scale, 0.0001 to 1 nat; surprise (the negative logprob) on a linear one, 0 to 8 nats.
    const gapLevel = (gap) => (gap > 0 ? Math.min(1, Math.max(0, (Math.log10(gap) + 4) / 4)) : 0);
    const level = (row) => {
      const value = row[column(shade.value)];
      if (value === null || value === undefined) return null;
      return shade.value === "Pi Logprob" ? Math.min(1, Math.max(0, -value / 8)) : gapLevel(value);
    };
    // Control and direction-changing characters would hide or reorder what the model said: spell them out.
    const special = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;
    const spell = (found) =>
      found === "\n" ? "\u23ce" : "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0");
    const dots = (run) => "\u00b7".repeat(run.length);
    const visible = (text) => (text === "" ? "\u2205" : text.replace(/^ +| +$/g, dots).replace(special, spell));
    const describe = (row) => tokenData.columns.map((name, at) => name + ": " + (row[at] ?? "-"));
    const tokenOf = (row) => {
      const token = make("span", visible(String(row[column("Decoded Token")])), "token");
      const strength = level(row);
      if (strength === null) token.classList.add("none");
      else token.style.setProperty("--level", strength.toFixed(3));
      token.classList.toggle("masked", row[column("Loss Mask")] === false);
      token.title = describe(row).join("\n");
      return token;
    };
    const rowOf = (row) => {
      const line = make("tr");
      row.forEach((value, at) => {
        const empty = value === null || value === undefined;
        const number = typeof value === "number";
        const text = at === column("Decoded Token") ? visible(String(value)) : empty ? "-" : short(value);
        const cell = make("td", text, empty ? "none" : number ? "number" : "");
        if (number) cell.dataset.value = value;
        line.append(cell);
      });
      return line;
    };
    const show = () => {
      const sample = tokenData.samples[Number(choice.value)];
      strip.replaceChildren(...sample.rows.map(tokenOf));
      details.tBodies[0].replaceChildren(...sample.rows.map(rowOf));
      for (const cell of details.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
      note.textContent = sample.note;
    };
    const header = details.tHead.rows[0];
    header.replaceChildren(...tokenData.columns.map((name) => make("th", name)));
    makeSortable(details);
    tokenData.samples.forEach((sample, index) => {
      const option = make("option", sample.label);
      option.value = index;
      choice.append(option);
    });
    for (const name of ["Abs Diff Pi-Generated", "Abs Diff Pi-Ref", "Pi Logprob"]) {
      if (column(name) < 0) continue;
      const option = make("option", name === "Pi Logprob" ? "surprise (- Pi Logprob)" : name);
      option.value = name;
      shade.append(option);
    }
    for (const swatch of document.querySelectorAll(".shade"))
      swatch.style.setProperty("--level", gapLevel(Number(swatch.textContent)).toFixed(3));
    choice.addEventListener("change", show);
    shade.addEventListener("change", show);
    for (const button of document.querySelectorAll("button[data-sample]"))
      button.addEventListener("click", () => {
        choice.value = button.dataset.sample;
        show();
        document.getElementById("token-view").scrollIntoView();
      });
    show();
  }
  document.documentElement.dataset.ready = "yes";
})();
"""
