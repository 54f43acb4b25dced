// Runs beside the page, as a reader's hands would: the page itself stays as it was written, in a frame.
const page = document.querySelector("iframe").contentDocument, seen = {};
const table = page.querySelector("#table-per_sample_debug_table");
const column = (name) => {
  const at = [...table.querySelectorAll("th")].findIndex((cell) => cell.textContent === name);
  return [...table.querySelectorAll("tbody tr")].map((row) => row.cells[at].textContent);
};
const click = (name) => [...table.querySelectorAll("th button")].find((one) => one.textContent === name).click();
const tokens = () => [...page.querySelectorAll("#tokens .token")];
const levels = () => tokens().map((token) => Number(token.style.getPropertyValue("--level")));
const choose = (id, value) => {
  const select = page.getElementById(id);
  select.value = value;
  select.dispatchEvent(new Event("change"));
};

seen.title = page.title;
seen.scripts = page.scripts.length;
seen.elements = ["img", "b", "i", "br"].map((name) => page.querySelectorAll(name).length);
seen.order = [column("Advantages")];
click("Advantages"); seen.order.push(column("Advantages"));
click("Advantages"); seen.order.push(column("Advantages"));
click("Mean Abs Diff Pi-Ref"); seen.gaps = [column("Mean Abs Diff Pi-Ref")];
click("Mean Abs Diff Pi-Ref"); seen.gaps.push(column("Mean Abs Diff Pi-Ref"));
const filter = table.querySelector("input");
filter.value = "20-";
filter.dispatchEvent(new Event("input"));
seen.shown = [table.querySelector(".shown").textContent, table.querySelectorAll("tbody tr:not([hidden])").length];
filter.value = "";
filter.dispatchEvent(new Event("input"));

seen.choices = page.getElementById("sample").options.length;
seen.texts = tokens().map((token) => token.textContent);
seen.levels = [levels()];
choose("shade", "Abs Diff Pi-Ref"); seen.levels.push(levels());
choose("shade", "Pi Logprob"); seen.levels.push(levels());
choose("shade", "Abs Diff Pi-Generated");
const last = [...table.querySelectorAll("tbody tr")].find((row) => row.textContent.includes("10-3<i>"));
last.querySelector("button[data-sample]").click();
seen.chosen = page.getElementById("sample").selectedOptions[0].textContent;
seen.levels.push(levels());
seen.kinds = tokens().map((token) => token.className);
choose("shade", "Abs Diff Pi-Ref"); seen.without = tokens().map((token) => token.className);
seen.background = page.defaultView.getComputedStyle(tokens()[0]).backgroundColor;
seen.details = page.querySelectorAll("#token-details tbody tr").length;

seen.drawn = [...page.querySelectorAll(".chart")].map((chart) => chart.querySelectorAll(".trace").length);
seen.title = [seen.title, page.title];
document.getElementById("seen").textContent = JSON.stringify(seen);
