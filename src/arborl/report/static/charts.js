"use strict";
const INK = ["#1b6ca8", "#d1495b", "#2e933c", "#8e5ea2", "#e39a2d", "#3a9da6", "#7a5230", "#e377c2", "#6b7280", "#a3b118", "#0b3c5d", "#f2a6a0", "#8fc1a9", "#b38cd9"];

/** Where in a list by epochs the one nearest to an epoch stands; the newest for none. */
function nearest(items, epoch) {
  return epoch === null ? items.length - 1 : d3.leastIndex(items, (item) => Math.abs(item.epoch - epoch));
}

/** The points of one metric: epochs where it has a value, with a band where its standard error is known. */
function pointsOf(metrics, name, errorName) {
  const values = metrics[name] || [], errors = metrics[errorName] || [];
  return metrics.epoch
    .map((x, i) => ({ x, y: values[i], error: errors[i] ?? null }))
    .filter((point) => point.y !== null && point.y !== undefined);
}

/**
 * Lines over a common axis. Each series is {name, points: [{x, y, error}], colour}; `bounds` are {low, high}.
 * What the pointer is nearest to is told in full, every series at once.
 */
function lineChart(host, { title, series, across = "epoch", bounds = {}, height = 220, note, words = num }) {
  series = series.filter((line) => line.points.length);
  if (!series.length) return false;
  series.forEach((line, i) => (line.colour ??= INK[i % INK.length]));
  const figure = h("figure", { class: "chart" });
  host.append(figure);
  figure.append(h("figcaption", {}, h("strong", {}, title), ...series.map((line) =>
    h("span", { class: "key" }, h("i", { style: `background:${line.colour}` }), line.name))));
  const width = Math.max(260, figure.clientWidth);
  const marks = [Plot.gridY({ strokeOpacity: 0.12 })];
  for (const { points, colour } of series) {
    const banded = points.filter((p) => p.error !== null);
    if (points.length > 2 && banded.length > 1) {
      marks.push(Plot.areaY(banded, { x: "x", y1: (p) => p.y - p.error, y2: (p) => p.y + p.error, fill: colour, fillOpacity: 0.18 }));
    }
    if (points.length > 2) { // two points are not a curve
      marks.push(Plot.lineY(points, { x: "x", y: "y", stroke: colour, strokeWidth: 1.8 }));
    } else {
      marks.push(Plot.ruleX(banded, { x: "x", y1: (p) => p.y - p.error, y2: (p) => p.y + p.error, stroke: colour, strokeWidth: 1.8 }));
    }
    if (points.length < 40) marks.push(Plot.dot(points, { x: "x", y: "y", fill: colour, r: 2.4 }));
  }
  for (const [side, value] of Object.entries(bounds)) {
    marks.push(Plot.ruleY([value], { stroke: "var(--bad)", strokeDasharray: "4 3" }));
    marks.push(Plot.text([value], { y: (v) => v, text: [side === "low" ? "not below" : "not above"], frameAnchor: "right", dy: -6, fill: "var(--bad)" }));
  }
  const together = d3.groups(series.flatMap((line) => line.points.map((p) => ({ ...p, line: line.name }))), (p) => p.x)
    .map(([x, points]) => ({
      x, y: d3.max(points, (p) => p.y),
      text: [`${across} ${words(x)}`, ...points.map((p) => `${p.line} ${plusMinus(p.y, p.error)}`)].join("\n"),
    }));
  marks.push(Plot.ruleX(together, Plot.pointerX({ x: "x", stroke: "currentColor", strokeOpacity: 0.3 })));
  marks.push(Plot.tip(together, Plot.pointerX({ x: "x", y: "y", title: "text", fontSize: 12 })));
  figure.append(plotted({ width, height, x: { label: across, tickFormat: words }, y: { label: null, nice: true, ticks: 5, tickFormat: (v) => num(v, 8) }, marks }, title));
  if (note) figure.append(h("p", { class: "note" }, note));
  return true;
}

/** A chart that says what it is to those who cannot see it. */
function plotted(options, label) {
  const whole = Plot.plot({ marginLeft: 52, marginBottom: 34, marginRight: 14, style: { fontSize: "11px", background: "none" }, ...options });
  whole.setAttribute("role", "img");
  whole.setAttribute("aria-label", label);
  return whole;
}

/** Stacked seconds by stage, an epoch or some neighbouring epochs a bar. */
function timeChart(host, data) {
  const { metrics, stages } = data;
  const known = stages.filter((stage) => (metrics[`time/${stage}`] || []).some((s) => s));
  const rows = metrics.epoch.map((epoch, i) => ({ epoch, spent: known.map((stage) => metrics[`time/${stage}`][i] ?? 0) }));
  if (!known.length) return false;
  const width = Math.max(260, host.clientWidth), most = Math.max(10, Math.floor(width / 8));
  const size = Math.ceil(rows.length / most);
  const bars = d3.range(0, rows.length, size).map((start) => {
    const some = rows.slice(start, start + size);
    return { from: some[0].epoch, to: some.at(-1).epoch, spent: known.map((_, i) => d3.mean(some, (row) => row.spent[i])) };
  });
  const pieces = bars.flatMap((bar) => {
    let low = 0;
    return known.map((stage, i) => ({ ...bar, stage, y1: low, y2: (low += bar.spent[i]) }));
  });
  const colour = (stage) => INK[stages.indexOf(stage) % INK.length];
  const tips = bars.map((bar) => ({
    x: (bar.from + bar.to + 1) / 2, y: d3.sum(bar.spent),
    text: [bar.from === bar.to ? `epoch ${bar.from}` : `epochs ${bar.from} to ${bar.to}, mean`,
      ...known.map((stage, i) => `${stage} ${num(bar.spent[i], 3)} s`), `together ${num(d3.sum(bar.spent), 4)} s`].join("\n"),
  }));
  const figure = h("figure", { class: "chart" });
  host.append(figure);
  figure.append(h("figcaption", {}, h("strong", {}, "seconds of each epoch, by stage")));
  figure.append(plotted({
    width, height: 240, x: { label: "epoch", nice: false }, y: { label: null, grid: true, ticks: 5 },
    marks: [
      Plot.rectY(pieces, { x1: "from", x2: (p) => p.to + 0.9, y1: "y1", y2: "y2", fill: (p) => colour(p.stage) }),
      Plot.tip(tips, Plot.pointerX({ x: "x", y: "y", title: "text", fontSize: 12 })),
    ],
  }, "seconds of each epoch, by stage"));
  const totals = Object.entries(data.seconds).sort((a, b) => b[1] - a[1]);
  const all = d3.sum(totals, (t) => t[1]);
  host.append(h("table", { class: "compact" },
    h("thead", {}, h("tr", {}, ["stage", "seconds", "share"].map((name) => h("th", {}, name)))),
    h("tbody", {}, totals.map(([stage, spent]) => h("tr", {},
      h("td", {}, h("span", { class: "key" }, h("i", { style: `background:${colour(stage)}` }), stage)),
      h("td", { class: "number" }, num(spent, 4)), h("td", { class: "number" }, `${num((100 * spent) / all, 3)} %`))))));
  return true;
}
