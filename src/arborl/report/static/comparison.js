"use strict";
// A comparison's page: the table, score against compute and seconds, the front, and what each cell's pictures became.

function head(host, data) {
  host.replaceChildren(h("h1", {}, data.name), h("p", { class: "headline" }, `${data.cells.length} cells, ${data.reward} on ${data.evaluated_on}`));
}

function inkOf(data) {
  return new Map(data.cells.map(({ cell }, i) => [cell, INK[i % INK.length]]));
}

function tableSection(host, data) {
  const ink = inkOf(data);
  const rows = data.table.rows.map(([cell, ...values], i) => h("tr", {},
    h("td", {}, h("span", { class: "key" }, h("i", { style: `background:${ink.get(cell)}` })), h("code", {}, cell),
      (data.linked ? Object.entries(data.cells[i].reports) : []).map(([seed, place]) => [" ", h("a", { href: place }, `seed ${seed}`)])),
    values.map((value) => h("td", { class: "number" }, value))));
  host.append(h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, data.table.head.map((name, i) => h("th", { class: i ? "number" : null }, name)))), h("tbody", {}, rows))),
    h("p", { class: "note" }, data.notes));
  return true;
}

function curvesSection(host, data) {
  const ink = inkOf(data);
  for (const across of ["compute", "seconds"]) {
    const series = data.cells.map(({ cell, curves }) => ({ name: cell, colour: ink.get(cell), points: curves[across].map(([x, y, error]) => ({ x, y, error })) }));
    lineChart(host, {
      title: `${data.reward} on ${data.evaluated_on} against ${across === "compute" ? "compute" : "seconds of training"}`, across, series, height: 300, words: across === "compute" ? count : (v) => num(v, 3),
      note: across === "compute" ? "A forward counts 1, a forward+backward 3. Bands are standard errors over seeds." : "Seconds of runs that shared a machine: compare them within one comparison alone.",
    });
  }
  return true;
}

function frontSection(host, data) {
  const ink = inkOf(data);
  const points = data.cells.flatMap(({ cell, curves }) => curves.compute.map(([x, y]) => ({ x, y, cell })));
  const width = Math.max(260, host.clientWidth), text = (p) => `${p.cell}\ncompute ${count(p.x)}\n${data.reward} ${num(p.y)}`;
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, h("strong", {}, "no cell reaches more with less")));
  figure.append(plotted({
    width, height: 320, x: { label: "compute", tickFormat: count }, y: { label: null, nice: true, grid: true },
    marks: [
      Plot.line(data.front, { x: "x", y: "y", curve: "step-after", stroke: "currentColor", strokeOpacity: 0.5 }),
      Plot.dot(points, { x: "x", y: "y", fill: (p) => ink.get(p.cell), fillOpacity: 0.35, r: 2.5 }),
      Plot.dot(data.front, { x: "x", y: "y", fill: (p) => ink.get(p.cell), r: 5 }),
      Plot.tip([...points, ...data.front], Plot.pointer({ x: "x", y: "y", title: text, fontSize: 12 })),
    ],
  }, "Pareto front of score against compute"));
  host.append(figure);
  return true;
}

function picturesSection(host, data) {
  const shown = data.cells.filter(({ pictures }) => pictures?.pictures.length);
  if (!shown.length) return false;
  const before = data.before.pictures, columns = d3.range(Math.min(before.length, ...shown.map(({ pictures }) => pictures.pictures.length)));
  const face = (picture) => h("td", {}, h("img", { src: picture.src, alt: picture.prompt, title: picture.prompt }), h("small", {}, num(picture.scores[data.reward], 3)));
  host.append(h("div", { class: "scroll" }, h("table", { class: "faces" },
    h("thead", {}, h("tr", {}, h("th", {}, ""), columns.map((i) => h("th", {}, before[i].prompt)))),
    h("tbody", {}, h("tr", {}, h("th", {}, "before"), columns.map((i) => face(before[i]))),
      shown.map(({ cell, pictures }) => h("tr", {}, h("th", {}, h("code", {}, cell), h("br"), `after ${pictures.epoch} epochs`), columns.map((i) => face(pictures.pictures[i]))))))),
    h("p", { class: "note" }, `The same captions and the same noise for every cell, with the ${data.reward} of each picture.`));
  return true;
}

section("table", "Table", tableSection);
section("curves", "Curves", curvesSection);
section("front", "Pareto front", frontSection);
section("pictures", "Pictures", picturesSection);
start(head);
