"use strict";
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const numbers = (id) => { const found = document.getElementById(id); return found && JSON.parse(found.textContent); };

// What can be switched: of the panels the one is shown whose key the controls' values are.
const valueOf = (control) => control.type === "range" ? JSON.parse(control.dataset.texts)[control.value] : control.value;
for (const group of all(".switched")) {
  const controls = all(":scope > .picks :is(input, select)", group);
  if (!controls.length) continue;
  const show = () => {
    const chosen = controls.filter((control) => control.type !== "radio" || control.checked);
    const key = chosen.map(valueOf).join("|");
    for (const panel of all(":scope > [data-key]", group)) panel.hidden = panel.dataset.key !== key;
    for (const control of chosen.filter((one) => one.type === "range")) {
      control.setAttribute("aria-valuetext", valueOf(control));
      control.nextElementSibling.textContent = valueOf(control);
    }
  };
  group.addEventListener("input", show);
  show();
}

// Tables are sorted by the buttons in their heads: numbers by size, what is missing last.
const keyOf = (cell) => {
  if (cell === undefined) return null;
  const text = cell.dataset.sort ?? cell.textContent.trim();
  const number = parseFloat(text);
  return text === "" || text === "–" ? null : Number.isNaN(number) ? text : number;
};
const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
for (const table of all("table.sortable")) {
  for (const head of all("thead th", table)) {
    head.firstElementChild.addEventListener("click", () => {
      const up = head.ariaSort ? head.ariaSort !== "ascending" : head.cellIndex === 0;
      all("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keys = new Map(all("tbody tr", table).map((row) => [row, keyOf(row.cells[head.cellIndex])]));
      const order = (a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        return x === null || y === null ? (x === null) - (y === null) : (up ? 1 : -1) * compare(x, y);
      };
      table.tBodies[0].append(...[...keys.keys()].sort(order));
    });
  }
}

// The leaderboard under another metric or against another reference.
const board = document.getElementById("board");
if (board) {
  const { views } = numbers("views");
  const section = board.closest("section");
  const chosen = (name) => section.querySelector(`select[name=${name}]`)?.value;
  const first = Object.keys(views)[0].split("|");
  const word = (head, text) => { (head.querySelector("abbr") ?? head.firstElementChild).textContent = text; };
  const fill = (row, found) => {
    row.className = found?.best ? "best" : "";
    const [mean, gain, worst, tenth, ...others] = found?.text ?? Array(8).fill("–");
    const order = found?.sort ?? Array(8).fill(null);
    const cells = [...row.cells].slice(1);
    const texts = [mean, null, null, worst, tenth, ...others];
    texts.forEach((text, i) => { if (text !== null) cells[i].textContent = text; });
    [0, 1, 1, 2, 3, 4, 5, 6, 7].forEach((place, i) => { cells[i].dataset.sort = order[place] ?? ""; });
    if (found?.share) cells[2].dataset.sort = found.share[2] - found.share[0];
    const drawn = (kind, parts) => found?.share
      ? `<span class="${kind}" role="img">${parts.map((part) => `<i class="${part}"></i>`).join("")}</span><small></small>`
      : "<small></small>";
    cells[1].innerHTML = drawn("forest", ["zero", "range", "mid"]);
    cells[2].innerHTML = drawn("share", ["worse", "equal", "better"]);
    cells[1].lastChild.textContent = gain;
    cells[2].lastChild.textContent = found?.share ? found.share.join(" / ") : "–";
    if (!found?.share) return;
    const forest = cells[1].firstChild, places = found.forest.map((place) => place ?? found.forest[1]);
    ["low", "mid", "high", "zero"].forEach((name, i) => forest.style.setProperty(`--${name}`, places[i]));
    forest.setAttribute("aria-label", gain);
    forest.style.color = `var(--${["worse", "muted", "better"][found.sign + 1]})`;
    [...cells[2].firstChild.children].forEach((part, i) => part.style.setProperty("--part", found.share[i]));
    const [worse, equal, better] = found.share;
    cells[2].firstChild.title = `worse for ${worse}, equal for ${equal}, better for ${better}`;
    cells[2].firstChild.setAttribute("aria-label", cells[2].firstChild.title);
  };
  const show = () => {
    const view = views[`${chosen("metric") ?? first[0]}|${chosen("reference") ?? first[1]}`];
    word(board.querySelector(".mean"), `${view.title}, mean ± std over seeds`);
    word(board.querySelector(".gain"), `Better than ${view.reference} by, 95 % interval`);
    for (const row of board.tBodies[0].rows) fill(row, view.rows[row.dataset.method]);
    board.classList.toggle("with-p", section.querySelector("input[name=p]").checked);
  };
  section.addEventListener("input", show);
  show();
}

// A table as text: shown, selected, and copied where the browser lets a page do that.
// Names are others' choice: none is a formula of a spreadsheet (perfed/data/csv_text.py), Markdown or LaTeX.
const formula = /(^|[;|\t\r\n\v\f\x85\u2028\u2029])(?=[\s"'\ufeff\u200b-\u200f\u2060]*[=+\-@＝＋－＠])/g;
const number = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?( ?[(\[±](\d|to|[\s.,+\-–±%()\[\]])*)?$/i;  // with its interval
const plain = (cell) => number.test(cell) ? cell : cell.replace(formula, "$1'");
const quoted = (cell) => /[",;\r\n]/.test(cell) ? `"${plain(cell).replaceAll('"', '""')}"` : plain(cell);
const markup = /[\\`*\[\]|~$]|(?<![\p{L}\p{N}])_|_(?![\p{L}\p{N}])/gu;
const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const marked = (cell) => cell.replace(/\s+/g, " ").replace(markup, "\\$&").replace(/[&<>]/g, (sign) => entities[sign]);
const signs = {
  "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
  "–": "--", "±": "$\\pm$", "Δ": "$\\Delta$",
};
const escaped = (cell) => cell.replace(/\s+/g, " ").replace(/[\\~^–±Δ&%$#_{}]/g, (sign) => signs[sign] ?? `\\${sign}`);
const texts = {
  csv: (rows) => rows.map((row) => row.map(quoted).join(",")),
  markdown: ([head, ...rows]) => {
    const rule = head.map((_, i) => i ? "---:" : "---");
    return [head.map(marked), rule, ...rows.map((row) => row.map(marked))].map((row) => `| ${row.join(" | ")} |`);
  },
  latex: ([head, ...rows], name) => {
    const line = (row) => `${row.map(escaped).join(" & ")} \\\\`;
    const label = `tab:${name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "")}`;
    const begin = ["\\begin{table}", "\\centering", `\\caption{${escaped(name)}.}`, `\\label{${label}}`];
    const body = ["\\toprule", line(head), "\\midrule", ...rows.map(line), "\\bottomrule"];
    const columns = `\\begin{tabular}{l${"r".repeat(head.length - 1)}}`;
    return ["% needs \\usepackage{booktabs}", ...begin, columns, ...body, "\\end{tabular}", "\\end{table}"];
  },
};
for (const bar of all(".copy")) {
  const area = bar.querySelector("textarea");
  bar.addEventListener("click", async ({ target }) => {
    if (!target.dataset.copy) return;
    const shown = (cell) => cell.offsetParent !== null;
    const rows = all("tr", document.getElementById(bar.dataset.of));
    const head = rows[0].cells[1].textContent.trim();
    const cells = rows.map((row) => [...row.cells].filter(shown).map((cell) => cell.textContent.trim()));
    area.value = texts[target.dataset.copy](cells, `${document.title}: ${head.split(",")[0]}`).join("\n") + "\n";
    area.hidden = false;
    area.select();
    const done = await navigator.clipboard?.writeText(area.value).then(() => true, () => document.execCommand("copy"));
    bar.querySelector("output").textContent = done ? "Copied." : "Selected: copy with Ctrl+C.";
  });
}

// The clients whose row has every word that is searched for, the first hundred of them.
const clients = numbers("clients-data");
if (clients) {
  const body = document.querySelector("#clients-table tbody");
  const search = document.querySelector("input[name=client]");
  const told = document.querySelector("#clients-found");
  const haystack = clients.rows.map((row) => row.slice(0, clients.words).join(" ").toLowerCase());
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = clients.rows.filter((_, i) => words.every((word) => haystack[i].includes(word)));
    body.replaceChildren(...found.slice(0, 100).map((row) => {
      const line = document.createElement("tr");
      row.forEach((value, i) => {
        const cell = line.appendChild(document.createElement(i ? "td" : "th"));
        if (!i) cell.scope = "row";
        cell.textContent = value ?? "–";
      });
      return line;
    }));
    const some = found.length > 100 ? ", the first 100 are shown" : found.length > 8 ? "; the table scrolls" : "";
    told.textContent = `${found.length} of ${clients.rows.length} clients${some}`;
  };
  search.addEventListener("input", show);
  show();
}

// A table that is wider than the screen says so; what is folded away because it is long is printed.
const boxes = all(".wide");
const hint = () => boxes.forEach((box) => box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1));
addEventListener("resize", hint);
document.addEventListener("toggle", hint, true);
document.addEventListener("input", hint);
hint();
const folded = all("details.printed");
const printing = (now) => document.documentElement.classList.toggle("printing", now);
addEventListener("beforeprint", () => {
  folded.forEach((one) => { one.dataset.was = one.open; one.open = true; });
  printing(true);
});
addEventListener("afterprint", () => {
  folded.forEach((one) => { one.open = one.dataset.was === "true"; });
  printing(false);
});
