"use strict";
// A recorded rollout as its tree: time runs to the right, a row for each leaf, an edge's colour is its advantage.
// Nodes are numbered roots first, so the edge e leads into node roots + e.

const treeView = { epoch: null, node: null, pinned: false }; // epoch null follows the newest
const ADVANTAGE = ["#a50f15", "#ef6548", "#b8b8b8", "#4292c6", "#08519c"];

function treeSection(host, data) {
  const { trees } = data;
  if (!trees.length) {
    host.append(h("p", { class: "note" }, "No tree was recorded (log.record_every=0), or none yet."));
    return true;
  }
  const view = h("div", { class: "tree-view" }), details = h("aside", { class: "details", "aria-live": "polite" });
  const said = h("output", { class: "tree-title", id: "tree-prompt" }), facts = h("dl", { class: "facts" });
  let now = 0;
  const show = (index) => {
    now = Math.max(0, Math.min(trees.length - 1, index));
    const tree = trees[now];
    treeView.epoch = now === trees.length - 1 ? null : tree.epoch;
    slider.value = now;
    slider.setAttribute("aria-valuetext", `epoch ${tree.epoch}`);
    said.replaceChildren(h("strong", {}, `epoch ${tree.epoch}`), ` “${tree.prompt}”`);
    facts.replaceChildren(...epochFacts(data, tree.epoch));
    drawTree(view, details, tree, (by) => show(now + by));
  };
  const few = trees.length < 2;
  const slider = h("input", {
    type: "range", min: 0, max: trees.length - 1, step: 1, id: "tree-epoch", "data-focus": "tree-epoch",
    "aria-label": "recorded epoch", disabled: few, oninput: () => show(Number(slider.value)),
  });
  const step = (by, label, text) => h("button", { type: "button", "aria-label": label, "data-focus": label, disabled: few, onclick: () => show(now + by) }, text);
  host.append(
    h("div", { class: "controls" }, step(-1, "tree before", "◀"), slider, step(1, "next tree", "▶"), said),
    facts, h("div", { class: "tree-frame" }, view, details), legend(),
  );
  if (data.trees_recorded > trees.length) {
    host.append(h("p", { class: "note" }, `${trees.length} of ${data.trees_recorded} recorded trees, evenly chosen, so that this file stays small.`));
  }
  show(nearest(trees, treeView.epoch));
  return true;
}

function legend() {
  const bar = h("i", { class: "ramp", style: `background:linear-gradient(90deg,${ADVANTAGE.join(",")})` });
  return h("p", { class: "note" },
    "Edges: ", h("span", { class: "key" }, "worse than average ", bar, " better"),
    "; thick ones were trained, thin ones were not. Shaded: the steps that add noise. Pictures at inner nodes are x̂0, what the model believed there. ",
    h("span", { class: "screen" }, "Point at an edge or a picture for its numbers, click to keep them; with the keyboard, arrows walk the tree, Page Up and Page Down change the epoch."));
}

/** What metrics.jsonl says of the epoch whose tree is shown. */
function epochFacts(data, epoch) {
  const { metrics } = data, row = metrics.epoch.indexOf(epoch);
  const names = new Map([
    ...trainedOf(data).map((name) => [`rewards/${name}/mean`, `mean ${name}`]),
    ["reward_std", "spread within a prompt"], ["ratio", "mean ratio"], ["ratio_error", "first ratio off by"],
    ["clip_ratio", "clipped"], ["advantage_abs", "mean |advantage|"], ["grad_norm", "gradient norm"],
  ]);
  return [...names].filter(([name]) => row >= 0 && (metrics[name]?.[row] ?? null) !== null).map(([name, label]) => {
    const error = name.endsWith("/mean") ? metrics[name.replace(/mean$/, "stderr")]?.[row] : null;
    return h("div", {}, h("dt", { title: name }, label), h("dd", { "data-metric": name }, plusMinus(metrics[name][row], error)));
  });
}

/** A square-root scale with grey in the middle: small advantages are the usual ones and must still show a side. */
function advantageScale(values) {
  const most = d3.max(values, (v) => (v === null ? 0 : Math.abs(v))) || 1e-6;
  const colour = d3.scaleLinear([-1, -0.5, 0, 0.5, 1], ADVANTAGE).clamp(true);
  return (v) => (v === null ? "#9b9b9b" : colour(Math.sign(v) * Math.sqrt(Math.abs(v) / most)));
}

/** Where everything goes: pictures as large as rows and columns allow. */
function layOut(tree, width) {
  const rows = tree.leaves.length, scoreRoom = 56, top = 26, below = 34;
  const row = Math.max(18, Math.min(62, 620 / rows));
  const pictured = new Set(Object.keys(tree.pictures).map((node) => tree.depth[node]));
  /** The least that each step may take, for pictures of this size. */
  const gaps = (picture) => tree.levels.map((level, d) => {
    const here = pictured.has(d) ? picture / 2 : 0, there = pictured.has(d + 1) ? picture / 2 : 0;
    return Math.max(here + there + (pictured.has(d) ? (level.noisy ? 12 : 6) : 0), level.noisy ? 7 : 5);
  });
  const needed = (picture) => d3.sum(gaps(picture)) + picture + 8 + scoreRoom;
  let picture = row - 6;
  while (picture > 16 && needed(picture) > width) picture -= 1;
  // What is left over goes to the steps where something is decided.
  const least = gaps(picture), spare = Math.max(0, width - needed(picture));
  const wish = tree.levels.map((level) => (level.noisy ? 1 : 0.25)), wishes = d3.sum(wish);
  const level = [picture / 2 + 4];
  least.forEach((gap, d) => level.push(level[d] + gap + (spare * wish[d]) / wishes));
  return {
    level, picture, row, width: Math.max(width, needed(picture)), height: rows * row + top + below, bottom: rows * row + top + 4,
    x: (node) => level[tree.depth[node]], y: (node) => top + (tree.place[node] + 0.5) * row,
    half: (node) => (node in tree.pictures ? picture / 2 : 0),
  };
}

function drawTree(host, details, tree, turn) {
  const at = layOut(tree, Math.max(280, host.clientWidth - 2)), colour = advantageScale(tree.advantage);
  host.replaceChildren();
  const svg = d3.select(host).append("svg")
    .attr("width", at.width).attr("height", at.height).attr("viewBox", `0 0 ${at.width} ${at.height}`)
    .attr("role", "tree").attr("aria-label", `tree of epoch ${tree.epoch}: ${tree.leaves.length} leaves`)
    .attr("tabindex", 0).attr("data-focus", "tree");
  drawWindow(svg, tree, at);
  const edge = drawEdges(svg, tree, at, colour), node = drawNodes(svg, tree, at, colour);
  const best = tree.leaves[d3.greatestIndex(tree.scores.total)] ?? tree.leaves[0];
  const select = (chosen, pinned = treeView.pinned) => {
    Object.assign(treeView, { node: chosen, pinned });
    const way = new Set(wayTo(tree, chosen));
    edge.classed("on", (e) => way.has(tree.roots + e));
    node.classed("chosen", (n) => n === chosen);
    svg.classed("choosing", true).attr("aria-activedescendant", `node-${chosen}`);
    details.replaceChildren(...detailsOf(tree, chosen));
  };
  const over = (chosen) => { if (!treeView.pinned) select(chosen); };
  edge.on("pointerenter", (_, e) => over(tree.roots + e)).on("click", (_, e) => select(tree.roots + e, true));
  node.on("pointerenter", (_, n) => over(n)).on("click", (_, n) => select(n, true));
  svg.on("click", (event) => { if (event.target === svg.node()) select(best, false); });
  svg.on("keydown", (event) => {
    const next = event.key === "End" ? best : stepFrom(tree, treeView.node, event.key);
    if (event.key === "PageUp") turn(-1);
    else if (event.key === "PageDown") turn(1);
    else if (event.key === "Escape") select(best, false);
    else if (next === undefined) return;
    else if (next !== null) select(next, true);
    event.preventDefault();
    document.querySelector('svg[role="tree"]').focus({ preventScroll: true });
  });
  // The same node of the next epoch, where there is one: what changed at it is what a reader wants to see.
  select(treeView.pinned && treeView.node < tree.depth.length ? treeView.node : best);
}

/** The steps that add noise, and the noise levels below. */
function drawWindow(svg, tree, at) {
  const runs = [];
  tree.levels.forEach((level, d) => {
    if (level.noisy && runs.at(-1)?.[1] === d) runs.at(-1)[1] = d + 1;
    else if (level.noisy) runs.push([d, d + 1]);
  });
  svg.append("g").selectAll("rect").data(runs).join("rect").attr("class", "window")
    .attr("x", ([a]) => at.level[a]).attr("width", ([a, b]) => at.level[b] - at.level[a]).attr("y", 18).attr("height", at.bottom - 18);
  svg.append("g").selectAll("text").data(runs.filter(([a, b]) => at.level[b] - at.level[a] > 90)).join("text").attr("class", "window-label")
    .attr("x", ([a, b]) => (at.level[a] + at.level[b]) / 2).attr("y", 12)
    .text(([a, b]) => (b - a > 1 ? `stochastic window, steps ${a} to ${b - 1}` : `stochastic step ${a}`));
  const ticks = [];
  [...tree.levels.map((level) => level.sigma), 0].forEach((sigma, d) => {
    if (sigma !== null && at.level[d] - (ticks.at(-1)?.x ?? -Infinity) > 26) ticks.push({ x: at.level[d], sigma });
  });
  svg.append("g").selectAll("text").data(ticks).join("text").attr("class", "tick")
    .attr("x", (tick) => tick.x).attr("y", at.bottom + 14).text((tick) => tick.sigma.toFixed(2));
  svg.append("text").attr("class", "tick").attr("x", 4).attr("y", at.height - 3).style("text-anchor", "start").text("noise level σ");
}

function drawEdges(svg, tree, at, colour) {
  const edges = d3.range(tree.parent.length), link = d3.linkHorizontal();
  const [from, to] = [(e) => tree.parent[e], (e) => tree.roots + e];
  const shape = (e) => link({ source: [at.x(from(e)), at.y(from(e))], target: [at.x(to(e)), at.y(to(e))] });
  const edge = svg.append("g").selectAll("g").data(edges).join("g").attr("class", "edge").attr("data-edge", (e) => e);
  edge.append("path").attr("class", "line").attr("d", shape).attr("stroke", (e) => colour(tree.advantage[e]))
    .attr("stroke-width", (e) => (tree.kept[e] ? 3.2 : 1.4)).attr("stroke-opacity", (e) => (tree.kept[e] ? 1 : 0.75));
  edge.append("path").attr("class", "hit").attr("d", shape);
  const room = (e) => at.x(to(e)) - at.x(from(e)) - at.half(to(e)) - at.half(from(e));
  const labelled = edges.filter((e) => tree.kept[e] && tree.advantage[e] !== null && room(e) > 34);
  if (at.row >= 26 && labelled.length <= 64) {
    svg.append("g").selectAll("text").data(labelled).join("text").attr("class", "advantage")
      .attr("x", (e) => at.x(to(e)) - at.half(to(e)) - 4).attr("y", (e) => at.y(to(e)) + (at.y(to(e)) > at.y(from(e)) ? 14 : -5))
      .text((e) => d3.format("+.2f")(tree.advantage[e]));
  }
  return edge;
}

function drawNodes(svg, tree, at, colour) {
  const side = at.picture, leafAt = new Map(tree.leaves.map((leaf, i) => [leaf, i]));
  const node = svg.append("g").selectAll("g").data(d3.range(tree.depth.length)).join("g").attr("class", "node").attr("data-node", (n) => n)
    .attr("id", (n) => `node-${n}`).attr("role", "treeitem").attr("transform", (n) => `translate(${at.x(n)},${at.y(n)})`)
    .attr("aria-label", (n) => spoken(tree, n));
  node.filter((n) => !(n in tree.pictures)).append("circle").attr("r", 2.2)
    .attr("fill", (n) => (n < tree.roots ? "currentColor" : colour(tree.advantage[n - tree.roots])));
  const pictured = node.filter((n) => n in tree.pictures);
  pictured.append("rect").attr("x", -side / 2 - 1).attr("y", -side / 2 - 1).attr("width", side + 2).attr("height", side + 2).attr("class", "frame");
  pictured.append("image").attr("href", (n) => tree.pictures[n]).attr("x", -side / 2).attr("y", -side / 2).attr("width", side).attr("height", side);
  node.filter((n) => leafAt.has(n)).append("text").attr("class", "score").attr("x", (n) => at.half(n) + 6).attr("y", 4)
    .text((n) => tree.scores[tree.shown][leafAt.get(n)]?.toFixed(3) ?? "no score");
  return node;
}

/** A node and all before it, up to its root. */
function wayTo(tree, node) {
  return node < tree.roots ? [node] : [node, ...wayTo(tree, tree.parent[node - tree.roots])];
}

/** Where an arrow key leads: null where there is nothing, undefined for other keys. */
function stepFrom(tree, here, key) {
  const alike = d3.range(tree.depth.length).filter((n) => tree.depth[n] === tree.depth[here]).sort((a, b) => tree.place[a] - tree.place[b]);
  const child = tree.parent.indexOf(here);
  const moves = {
    ArrowRight: () => (child < 0 ? null : tree.roots + child),
    ArrowLeft: () => (here < tree.roots ? null : tree.parent[here - tree.roots]),
    ArrowUp: () => alike[alike.indexOf(here) - 1] ?? null,
    ArrowDown: () => alike[alike.indexOf(here) + 1] ?? null,
    Home: () => 0,
  };
  return moves[key]?.();
}

function leavesBelow(tree, node) {
  const inside = new Set([node]);
  tree.parent.forEach((parent, edge) => { if (inside.has(parent)) inside.add(edge + tree.roots); });
  return tree.leaves.flatMap((leaf, i) => (inside.has(leaf) ? [i] : []));
}

function spoken(tree, node) {
  const leaf = tree.leaves.indexOf(node);
  const where = node < tree.roots ? `root ${node}` : `node ${node} after ${tree.depth[node]} steps`;
  const gain = node < tree.roots ? "" : `, advantage ${num(tree.advantage[node - tree.roots], 3)}`;
  return where + gain + (leaf < 0 ? "" : `, leaf with score ${num(tree.scores[tree.shown][leaf], 4)}`);
}

/** Everything known of a node and of the edge that leads to it. */
function detailsOf(tree, node) {
  const edge = node < tree.roots ? null : node - tree.roots, leaf = tree.leaves.indexOf(node);
  const rows = [];
  const add = (name, value, key) => rows.push(h("div", {}, h("dt", {}, name), h("dd", { "data-value": key }, value)));
  if (edge !== null) {
    const noisy = tree.eta[edge] > 0;
    add("step", `${tree.step[edge]}: σ ${num(tree.sigma[edge], 4)} → ${num(tree.sigma_next[edge], 4)}`, "step");
    add("kind", noisy ? `stochastic, ${tree.kernel}, η ${num(tree.eta[edge], 3)}, std ${num(tree.std[edge], 4)}` : "ODE", "kind");
    if (noisy) add("log-density", num(tree.log_density[edge], 7), "log_density");
    if (noisy) add("ratio", tree.kept[edge] ? num(tree.ratio[edge], 8) : "not trained", "ratio");
    add("advantage", num(tree.advantage[edge]), "advantage");
  }
  if (leaf < 0) {
    const below = leavesBelow(tree, node), scores = below.map((i) => tree.scores[tree.shown][i]).filter((score) => score !== null);
    add("leaves below", String(below.length), "leaves");
    add("their mean score", scores.length ? num(d3.mean(scores)) : "none", "value");
    if (scores.length > 1) add("from, to", `${num(d3.min(scores), 4)}, ${num(d3.max(scores), 4)}`, "range");
  } else {
    for (const name of Object.keys(tree.scores).filter((name) => name !== "total" || tree.shown === "total")) {
      add(name === "total" ? "combined score" : name, num(tree.scores[name][leaf]), `score-${name}`);
    }
  }
  const title = edge === null ? `root ${node}` : leaf < 0 ? `node ${node}` : `leaf ${leaf + 1} of ${tree.leaves.length}`;
  const picture = tree.pictures[node];
  return [
    picture ? h("img", { src: picture, alt: `picture at ${title}` }) : null,
    h("h3", {}, title, picture && leaf < 0 ? h("small", {}, " x̂0") : null), h("dl", {}, rows),
  ].filter(Boolean);
}
