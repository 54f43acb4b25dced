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

  const color = getComputedStyle(document.body).color, clear = "rgba(0,0,0,0)", grid = "rgba(128,128,128,.25)";
  const layout = {
    height: 260, margin: { l: 60, r: 12, t: 8, b: 34 }, hovermode: "x unified", font: { color, size: 11 },
    paper_bgcolor: clear, plot_bgcolor: clear, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
  };
  for (const [id, figure] of Object.entries(data("chart-data"))) {
    const axes = {
      xaxis: { gridcolor: grid, zeroline: false, tickformat: "d", ...figure.layout.xaxis },
      yaxis: { gridcolor: grid, zeroline: false, ...figure.layout.yaxis },
    };
    Plotly.newPlot(id, figure.data, { showlegend: true, ...layout, ...figure.layout, ...axes }, { responsive: true, displayModeBar: false });
  }

  // Tables: sort by a column (empty cells always last), filter by text.
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

  for (const text of document.querySelectorAll(".text.end")) text.scrollTop = text.scrollHeight;

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
    // Spell out control and direction characters, which would hide or reorder the model's output.
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
