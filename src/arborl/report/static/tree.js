"use strict";
// A recorded rollout as its tree: time runs to the right, a row for each leaf, an edge's colour is its advantage.

const treeView = { index: null, node: null, pinned: false };
const ADVANTAGE = ["#a50f15", "#ef6548", "#b8b8b8", "#4292c6", "#08519c"];

/** A square-root scale with grey in the middle: small advantages are the usual ones and must still show a side. */
function advantageScale(values) {
  const most = d3.max(values, (v) => (v === null ? 0 : Math.abs(v))) || 1e-6;
  const colour = d3.scaleLinear([-1, -0.5, 0, 0.5, 1], ADVANTAGE).clamp(true);
  const scale = (v) => (v === null ? "#9b9b9b" : colour(Math.sign(v) * Math.sqrt(Math.abs(v) / most)));
  scale.most = most;
  return scale;
}

function treeSection(host, data) {
  const { trees } = data;
  if (!trees.length) {
    host.append(h("p", { class: "note" }, "No tree was recorded (log.record_every=0), or none yet."));
    return true;
  }
  // A page that follows a run stays on the newest tree, unless its reader has gone to another.
  if (treeView.index === null || treeView.index >= trees.length) treeView.index = trees.length - 1;
  if (treeView.following) treeView.index = trees.length - 1;
  const view = h("div", { class: "tree-view" }), details = h("aside", { class: "details", "aria-live": "polite" });
  const said = h("output", { class: "tree-title", id: "tree-prompt" }), facts = h("dl", { class: "facts" });
  const show = (index) => {
    treeView.index = Math.max(0, Math.min(trees.length - 1, index));
    treeView.following = treeView.index === trees.length - 1;
    slider.value = treeView.index;
    const tree = trees[treeView.index];
    slider.setAttribute("aria-valuetext", `epoch ${tree.epoch}`);
    said.replaceChildren(h("strong", {}, `epoch ${tree.epoch}`), ` “${tree.prompt}”`);
    facts.replaceChildren(...epochFacts(data.metrics, tree.epoch));
    drawTree(view, details, tree, show);
  };
  const slider = h("input", {
    type: "range", min: 0, max: trees.length - 1, step: 1, id: "tree-epoch", "data-focus": "tree-epoch",
    "aria-label": "recorded epoch", disabled: trees.length < 2, oninput: () => show(Number(slider.value)),
  });
  const step = (by, label, text) => h("button", { type: "button", "aria-label": label, disabled: trees.length < 2, onclick: () => show(treeView.index + by) }, text);
  host.append(
    h("div", { class: "controls" }, step(-1, "tree before", "◀"), slider, step(1, "next tree", "▶"), said),
    facts, h("div", { class: "tree-frame" }, view, details), legend(),
  );
  if (data.trees_recorded > trees.length) {
    host.append(h("p", { class: "note" }, `${trees.length} of ${data.trees_recorded} recorded trees, evenly chosen, so that this file stays small.`));
  }
  show(treeView.index);
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
function epochFacts(metrics, epoch) {
  const row = metrics.epoch.indexOf(epoch);
  const names = { reward: "reward", reward_std: "spread within a prompt", ratio: "mean ratio", ratio_error: "first ratio off by", clip_ratio: "clipped", advantage_abs: "mean |advantage|", grad_norm: "gradient norm" };
  return Object.entries(names).filter(([name]) => row >= 0 && metrics[name]?.[row] !== undefined && metrics[name][row] !== null)
    .map(([name, label]) => {
      const error = name === "reward" ? metrics.reward_stderr?.[row] : null;
      return h("div", {}, h("dt", { title: name }, label), h("dd", { "data-metric": name }, plusMinus(metrics[name][row], error)));
    });
}

/** Where everything goes: pictures as large as rows and columns allow. */
function layOut(tree, width) {
  const rows = tree.leaves.length, levels = tree.levels.length;
  const row = Math.max(18, Math.min(62, 620 / rows));
  const pictured = new Set(Object.keys(tree.pictures).map((node) => tree.depth[node]));
  const scoreRoom = 56;
  const gaps = (picture) => tree.levels.map((level, d) =>
    Math.max(pictured.has(d) ? picture * (pictured.has(d + 1) ? 1 : 0.5) + (level.noisy ? 12 : 6) : 0, level.noisy ? 7 : 5) + (pictured.has(d + 1) && !pictured.has(d) ? picture / 2 : 0));
  let picture = row - 6;
  const needed = (p) => d3.sum(gaps(p)) + p + 8 + scoreRoom;
  while (picture > 16 && needed(picture) > width) picture -= 1;
  const minimum = gaps(picture), spare = Math.max(0, width - needed(picture));
  // What is left over goes to the steps where something is decided.
  const wish = tree.levels.map((level) => (level.noisy ? 1 : 0.25)), wishes = d3.sum(wish);
  const x = [picture / 2 + 4];
  for (let d = 0; d < levels; d++) x.push(x[d] + minimum[d] + (spare * wish[d]) / wishes);
  const height = rows * row + 26 + 34;
  return { x: (node) => x[tree.depth[node]], level: x, y: (node) => 26 + (tree.place[node] + 0.5) * row, picture, row, height, width: Math.max(width, needed(picture)) };
}

function drawTree(host, details, tree, show) {
  const at = layOut(tree, Math.max(280, host.clientWidth - 2));
  const colour = advantageScale(tree.advantage);
  const nodes = d3.range(tree.depth.length), edges = d3.range(tree.parent.length);
  const children = d3.group(edges, (edge) => tree.parent[edge]);
  const edgeOf = (node) => (node < tree.roots ? null : node - tree.roots);
  const childOf = (edge) => edge + tree.roots;
  host.replaceChildren();
  const svg = d3.select(host).append("svg")
    .attr("width", at.width).attr("height", at.height).attr("viewBox", `0 0 ${at.width} ${at.height}`)
    .attr("role", "tree").attr("aria-label", `tree of epoch ${tree.epoch}: ${tree.leaves.length} leaves`)
    .attr("tabindex", 0).attr("data-focus", "tree");

  // The steps that add noise, and the noise levels below.
  const noisy = tree.levels.map((level, d) => ({ ...level, d })).filter((level) => level.noisy);
  const runs = [];
  for (const { d } of noisy) {
    if (runs.length && runs.at(-1)[1] === d) runs.at(-1)[1] = d + 1;
    else runs.push([d, d + 1]);
  }
  const bottom = at.height - 30;
  svg.append("g").selectAll("rect").data(runs).join("rect").attr("class", "window")
    .attr("x", ([a]) => at.level[a]).attr("width", ([a, b]) => at.level[b] - at.level[a]).attr("y", 18).attr("height", bottom - 18);
  const long = runs.filter(([a, b]) => at.level[b] - at.level[a] > 90);
  svg.append("g").selectAll("text").data(long).join("text").attr("class", "window-label")
    .attr("x", ([a, b]) => (at.level[a] + at.level[b]) / 2).attr("y", 12)
    .text(([a, b]) => (b - a > 1 ? `stochastic window, steps ${a} to ${b - 1}` : `stochastic step ${a}`));
  const ticks = [...tree.levels.map((level, d) => ({ d, sigma: level.sigma })), { d: tree.levels.length, sigma: 0 }];
  let last = -Infinity;
  const roomy = ticks.filter(({ d }) => at.level[d] - last > 26 && (last = at.level[d]) !== null);
  svg.append("g").selectAll("text").data(roomy).join("text").attr("class", "tick")
    .attr("x", ({ d }) => at.level[d]).attr("y", bottom + 14).text(({ sigma }) => sigma.toFixed(2));
  svg.append("text").attr("class", "tick").attr("x", 4).attr("y", at.height - 3).style("text-anchor", "start").text("noise level σ");

  const link = d3.linkHorizontal();
  const shape = (edge) => link({ source: [at.x(tree.parent[edge]), at.y(tree.parent[edge])], target: [at.x(childOf(edge)), at.y(childOf(edge))] });
  const edge = svg.append("g").selectAll("g").data(edges).join("g").attr("class", "edge").attr("data-edge", (e) => e);
  edge.append("path").attr("class", "line").attr("d", shape).attr("stroke", (e) => colour(tree.advantage[e]))
    .attr("stroke-width", (e) => (tree.kept[e] ? 3.2 : 1.4)).attr("stroke-opacity", (e) => (tree.kept[e] ? 1 : 0.75));
  edge.append("path").attr("class", "hit").attr("d", shape);
  const half = (n) => (n in tree.pictures ? at.picture / 2 : 0);
  const room = (e) => at.x(childOf(e)) - at.x(tree.parent[e]) - half(childOf(e)) - half(tree.parent[e]);
  const labelled = edges.filter((e) => tree.kept[e] && tree.advantage[e] !== null && room(e) > 34);
  if (at.row >= 26 && labelled.length <= 64) {
    svg.append("g").selectAll("text").data(labelled).join("text").attr("class", "advantage")
      .attr("x", (e) => at.x(childOf(e)) - half(childOf(e)) - 4).attr("y", (e) => at.y(childOf(e)) + (at.y(childOf(e)) > at.y(tree.parent[e]) ? 14 : -5))
      .text((e) => d3.format("+.2f")(tree.advantage[e]));
  }

  const node = svg.append("g").selectAll("g").data(nodes).join("g").attr("class", "node").attr("data-node", (n) => n)
    .attr("id", (n) => `node-${n}`).attr("role", "treeitem").attr("transform", (n) => `translate(${at.x(n)},${at.y(n)})`)
    .attr("aria-label", (n) => spoken(tree, n));
  node.filter((n) => !(n in tree.pictures)).append("circle").attr("r", 2.2).attr("fill", (n) => (edgeOf(n) === null ? "currentColor" : colour(tree.advantage[edgeOf(n)])));
  const pictured = node.filter((n) => n in tree.pictures), side = at.picture;
  pictured.append("rect").attr("x", -side / 2 - 1).attr("y", -side / 2 - 1).attr("width", side + 2).attr("height", side + 2).attr("class", "frame");
  pictured.append("image").attr("href", (n) => tree.pictures[n]).attr("x", -side / 2).attr("y", -side / 2).attr("width", side).attr("height", side);
  const leafAt = new Map(tree.leaves.map((leaf, i) => [leaf, i]));
  node.filter((n) => leafAt.has(n)).append("text").attr("class", "score").attr("x", (n) => (n in tree.pictures ? side / 2 : 4) + 6).attr("y", 4)
    .text((n) => { const score = tree.scores.total[leafAt.get(n)]; return score === null ? "no score" : score.toFixed(3); });

  const path = (n) => { const found = []; for (let at = n; ; at = tree.parent[edgeOf(at)]) { found.push(at); if (edgeOf(at) === null) return found; } };
  const select = (n, pin) => {
    if (pin !== undefined) treeView.pinned = pin;
    treeView.node = n;
    const way = new Set(n === null ? [] : path(n));
    edge.classed("on", (e) => way.has(childOf(e)));
    node.classed("chosen", (m) => m === n);
    svg.classed("choosing", n !== null).attr("aria-activedescendant", n === null ? null : `node-${n}`);
    details.replaceChildren(...(n === null ? [h("p", { class: "note" }, "Nothing chosen.")] : detailsOf(tree, n)));
  };
  const best = tree.leaves[d3.greatestIndex(tree.scores.total)] ?? tree.leaves[0];
  const over = (n) => { if (!treeView.pinned) select(n); };
  edge.on("pointerenter", (_, e) => over(childOf(e))).on("click", (_, e) => select(childOf(e), true));
  node.on("pointerenter", (_, n) => over(n)).on("click", (_, n) => select(n, true));
  svg.on("click", (event) => { if (event.target === svg.node()) select(best, false); });
  svg.on("keydown", (event) => {
    const here = treeView.node ?? 0;
    const sameDepth = nodes.filter((n) => tree.depth[n] === tree.depth[here]).sort((a, b) => tree.place[a] - tree.place[b]);
    const beside = (by) => sameDepth[sameDepth.indexOf(here) + by];
    const moves = {
      ArrowRight: () => children.has(here) && childOf(children.get(here)[0]),
      ArrowLeft: () => edgeOf(here) !== null && tree.parent[edgeOf(here)],
      ArrowUp: () => beside(-1), ArrowDown: () => beside(1), Home: () => 0, End: () => best,
    };
    if (event.key === "PageUp" || event.key === "PageDown") show(treeView.index + (event.key === "PageDown" ? 1 : -1));
    else if (event.key === "Escape") select(best, false);
    else if (event.key in moves) {
      const next = moves[event.key]();
      if (Number.isInteger(next)) select(next, true);
    } else return;
    event.preventDefault();
    document.querySelector('svg[role="tree"]').focus({ preventScroll: true });
  });
  // The same node of the next epoch, where there is one: what changed at it is what a reader wants to see.
  select(treeView.pinned && treeView.node < nodes.length ? treeView.node : best);
}

function leavesBelow(tree, node) {
  const inside = new Set([node]);
  tree.parent.forEach((parent, edge) => { if (inside.has(parent)) inside.add(edge + tree.roots); });
  return tree.leaves.flatMap((leaf, i) => (inside.has(leaf) ? [i] : []));
}

function spoken(tree, node) {
  const edge = node - tree.roots, leaf = tree.leaves.indexOf(node);
  const where = node < tree.roots ? `root ${node}` : `node ${node} after ${tree.depth[node]} steps`;
  const gain = node < tree.roots ? "" : `, advantage ${num(tree.advantage[edge], 3)}`;
  return where + gain + (leaf < 0 ? "" : `, leaf with score ${num(tree.scores.total[leaf], 4)}`);
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
  const below = leavesBelow(tree, node).map((i) => tree.scores.total[i]).filter((score) => score !== null);
  if (leaf < 0) {
    add("leaves below", String(leavesBelow(tree, node).length), "leaves");
    add("their mean score", below.length ? num(d3.mean(below)) : "none", "value");
    if (below.length > 1) add("from, to", `${num(d3.min(below), 4)}, ${num(d3.max(below), 4)}`, "range");
  } else {
    const names = Object.keys(tree.scores), single = names.filter((name) => name !== "total" && !name.includes("/")).length === 1;
    for (const name of names.filter((name) => !(single && name === "total"))) {
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
