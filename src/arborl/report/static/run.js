"use strict";
// A run's page, from top to bottom.

function head(host, data) {
  const { metrics, summary } = data, reward = trainedOf(data)[0];
  const ends = evaluatedPoints(metrics, reward, "eval"), few = evaluatedPoints(metrics, reward, "eval_between");
  // Until the last one there is but one of all pictures.
  const evaluations = ends.length < 2 && few.length > ends.length ? few : ends;
  const where = `${reward} on ${evaluations === few ? `the first ${data.between} ` : ""}${data.evaluated_on}`;
  const done = data.finished && summary ? summary.epochs : Math.max(0, ...metrics.epoch.map((epoch) => epoch + 1));
  const facts = [
    ["state", data.finished ? "finished" : "not finished"],
    ["epochs", data.epochs === null || data.finished ? num(done) : `${num(done)} of ${num(data.epochs)}`],
    ["time", seconds(d3.sum(Object.values(data.seconds)))],
    data.environment.length ? ["on", data.environment.at(-1).device] : null,
    ["forwards", count(d3.max(metrics.forwards || []) ?? 0)],
    ["forward+backwards", count(d3.max(metrics.forward_backwards || []) ?? 0)],
    summary ? ["peak memory", `${num(summary.peak_memory / 2 ** 30, 3)} GiB`] : null,
  ].filter(Boolean);
  const [before, after] = [evaluations[0], evaluations.at(-1)], when = (point) => point.x ? `after ${num(point.x)} epochs` : "at the start";
  host.replaceChildren(
    h("h1", {}, data.name),
    evaluations.length > 1
      ? h("p", { class: "headline" }, `${where} `, h("b", {}, plusMinus(before.y, before.error)), before.x ? ` ${when(before)} → ` : " → ", h("b", {}, plusMinus(after.y, after.error)), ` ${when(after)}`)
      : h("p", { class: "headline" }, evaluations.length ? `${where} ${plusMinus(before.y, before.error)} ${when(before)}` : "no evaluation yet"),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    ...signsOf(data),
  );
}

function trainedOf(data) {
  return data.rewards.filter((reward) => reward.weight).map((reward) => reward.name);
}

function signsOf(data) {
  const signs = data.watch.signs.at(-1);
  return signs ? [h("p", { class: "warning", role: "note" }, `After ${signs.epoch} epochs this looks like reward hacking: ${signs.signs[0]}, but ${signs.signs.slice(1).join(", ")}.`)] : [];
}

/** Evaluations of a reward or a statistic: of all prompts ("eval"), or of those that every evaluation has ("eval_between"). */
function evaluatedPoints(metrics, name, which) {
  return pointsOf(metrics, `${which}/${name}`, `${which}/${name}_stderr`);
}

/** A curve over the same pictures throughout; where evaluations in between have fewer, those of all of them beside it. */
function evaluationSeries(data, name, how = "") {
  const all = { name: `${data.evaluated_on}${how}`, points: evaluatedPoints(data.metrics, name, "eval"), colour: INK[0] };
  const few = evaluatedPoints(data.metrics, name, "eval_between");
  return few.length ? [{ name: `the first ${data.between} ${data.evaluated_on}${how}`, points: few, colour: INK[1] }, { ...all, name: `all ${data.evaluated}` }] : [all];
}

/** A reward as it is, whatever its weight: of training leaves and of evaluations. */
function rewardChart(host, data, name, title, height) {
  return lineChart(host, {
    title, height,
    series: [
      { name: "training leaves", points: pointsOf(data.metrics, `rewards/${name}/mean`, `rewards/${name}/stderr`), colour: INK[4] },
      ...evaluationSeries(data, name, ", by ODE"),
    ],
  });
}

function curvesSection(host, data) {
  const trained = trainedOf(data), several = trained.length > 1;
  const grid = several ? h("div", { class: "charts" }) : host;
  if (several) host.append(grid);
  let shown = 0;
  for (const name of trained) {
    const { weight } = data.rewards.find((reward) => reward.name === name);
    shown += rewardChart(grid, data, name, weight === 1 && !several ? name : `${name}, weight ${num(weight)}`, several ? 220 : 280);
  }
  host.append(h("p", { class: "note" }, "Bands are standard errors: over prompts for training leaves, over pictures for evaluations. These draw the same noise every time, so a run's points move together." + (data.evaluated_otherwise ? ` Evaluations by other prompts, pictures, steps or rewards than the newest are not drawn (${num(data.evaluated_otherwise)}; evaluations.jsonl has them).` : "")));
  return shown > 0;
}

function rewardsSection(host, data) {
  const { metrics } = data, grid = h("div", { class: "charts" });
  host.append(grid);
  let shown = 0;
  for (const { name, weight } of data.rewards) {
    if (!weight) shown += rewardChart(grid, data, name, `${name}, watched and not trained`);
    const parts = Object.keys(metrics).map((key) => key.match(/^rewards\/([^/]+)\/(.+)\/mean$/)).filter((found) => found && found[1] === name).map((found) => found[2]);
    shown += lineChart(grid, {
      title: `${name}, its parts on training leaves`,
      series: parts.map((part) => ({ name: part, points: pointsOf(metrics, `rewards/${name}/${part}/mean`, `rewards/${name}/${part}/stderr`) })),
    });
  }
  return shown > 0;
}

function watchSection(host, data) {
  const { metrics, watch } = data;
  const told = watch.signs.length
    ? `Signs of reward hacking after ${watch.signs.map((sign) => sign.epoch).join(", ")} epochs.`
    : "No sign of reward hacking so far.";
  host.append(h("p", { class: watch.signs.length ? "warning" : "note" }, told, watch.watched.length ? ` Watched: ${watch.watched.join(", ")}.` : " No other reward is watched (eval.rewards)."));
  const grid = h("div", { class: "charts" });
  host.append(grid);
  const titles = { dark: "dark pixels, share", saturated: "saturated pixels, share", entropy: "colour entropy, bits", edges: "pixels on an edge, share" };
  let shown = 0;
  for (const [name, title] of Object.entries(titles)) {
    shown += lineChart(grid, { title, height: 170, bounds: watch.bounds[name], series: evaluationSeries(data, `pictures/${name}`) });
  }
  shown += lineChart(grid, { title: "diversity of a prompt's leaves", height: 170, bounds: watch.bounds.diversity, series: [{ name: "training leaves", points: pointsOf(metrics, "diversity"), colour: INK[4] }] });
  shown += lineChart(grid, { title: "spread of scores within a prompt", height: 170, series: [{ name: "training leaves", points: pointsOf(metrics, "reward_std"), colour: INK[4] }] });
  shown += lineChart(grid, { title: "the same of the z-scored sum", height: 170, series: [{ name: "training leaves", points: pointsOf(metrics, "reward_zscored_std"), colour: INK[4] }] });
  return shown > 0;
}

function updateSection(host, data) {
  const grid = h("div", { class: "charts" });
  host.append(grid);
  const titles = {
    ratio_error: "first ratio, distance from 1", ratio: "mean ratio", clip_ratio: "edges held back by the clip, share", approx_kl: "KL to the rollout's policy",
    divergence: "D to the rollout's policy", dropped: "edges left out as they go on away, share",
    distance: "answers off the old policy's, mean square", error: "matching error of noised leaves", kl: "KL to the base model", grad_norm: "gradient norm", advantage_abs: "mean |advantage|", window: "first step of the window", learning_rate: "learning rate",
  };
  let shown = 0;
  for (const [name, title] of Object.entries(titles)) {
    const points = pointsOf(data.metrics, name);
    if (name === "learning_rate" && new Set(points.map((point) => point.y)).size < 2) continue; // it stays as the settings say
    shown += lineChart(grid, { title, height: 150, series: [{ name, points, colour: INK[5] }] });
  }
  return shown > 0;
}

const anyView = { name: "loss" };

function anySection(host, data) {
  const names = Object.keys(data.metrics).filter((name) => name !== "epoch" && !name.endsWith("stderr")).sort();
  if (!names.length) return false;
  if (!names.includes(anyView.name)) anyView.name = names[0];
  const chart = h("div", {});
  const show = () => {
    chart.replaceChildren();
    const error = anyView.name.endsWith("/mean") ? anyView.name.replace(/mean$/, "stderr") : `${anyView.name}_stderr`;
    lineChart(chart, { title: anyView.name, series: [{ name: anyView.name, points: pointsOf(data.metrics, anyView.name, error), colour: INK[3] }] });
  };
  const choice = h("select", { id: "any-metric", "data-focus": "any", onchange: () => { anyView.name = choice.value; show(); } },
    names.map((name) => h("option", { value: name, selected: name === anyView.name }, name)));
  host.append(h("p", {}, h("label", { for: "any-metric" }, "metric "), choice, h("span", { class: "note" }, " docs/metrics.md says what each one means")), chart);
  show();
  return true;
}

/** What each start of the run had; a row a start, the newest first. */
function environmentSection(host, data) {
  if (!data.environment.length) return false;
  const text = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? Object.entries(value).filter(([, v]) => v).map(([k, v]) => `${k} ${v}`).join(", ") || "–" : String(value));
  const facts = {
    started: (start) => start.started, "after epochs": (start) => start.epoch, device: (start) => `${start.processes > 1 ? `${start.processes} × ` : ""}${text(start.device)}`,
    command: (start) => (start.command || []).join(" "), "in the folder": (start) => start.folder, host: (start) => `${text(start.host)}, ${text(start.cores)} cores, ${num((start.memory ?? NaN) / 2 ** 30, 3)} GiB, ${text(start.system)}`,
    versions: (start) => `arborl ${text(start.arborl)}, Python ${text(start.python)}, ${text(start.packages)}${start.cuda ? `, CUDA ${start.cuda}` : ""}`, commits: (start) => start.commits, precision: (start) => (start.mixed_precision === "no" ? "not mixed" : start.mixed_precision),
    prompts: ({ prompts }) => prompts && `${num(prompts.training)} to train on; evaluations are of ${num(prompts.evaluation)} ${prompts.evaluated_on}`,
  };
  const starts = [...data.environment].reverse();
  host.append(...starts.slice(0, 10).map((start) => h("table", { class: "settings starts" }, h("tbody", {}, Object.entries(facts).map(([name, of]) => h("tr", {}, h("td", {}, name), h("td", {}, text(of(start)))))))));
  if (starts.length > 10) host.append(h("p", { class: "note" }, `${starts.length} starts in all: environment.json has them.`));
  return true;
}

function settingsSection(host, data) {
  const table = (rows, last) => h("table", { class: "settings" },
    h("thead", {}, h("tr", {}, ["setting", "value", last].map((name) => h("th", {}, name)))),
    h("tbody", {}, rows.map((row) => h("tr", { title: row.says }, h("td", {}, h("code", {}, row.key)), h("td", {}, h("code", {}, row.value)),
      h("td", {}, last === "usually" ? h("code", {}, row.usual) : row.says)))));
  const changed = data.settings.filter((row) => row.usual !== null);
  host.append(changed.length ? table(changed, "usually") : h("p", { class: "note" }, "All as `arborl train` alone has them."),
    h("details", { "data-focus": "settings" }, h("summary", {}, `all ${data.settings.length} settings`), table(data.settings, "what it is")));
  return true;
}

section("curves", "Reward", curvesSection);
section("tree", "Tree", treeSection);
section("pictures", "Pictures", picturesSection);
section("rewards", "Parts and watched rewards", rewardsSection);
section("watch", "Reward hacking", watchSection);
section("update", "Update", updateSection);
section("time", "Time", timeChart);
section("any", "Any metric", anySection);
section("settings", "Settings", settingsSection);
section("environment", "Made with", environmentSection);
start(head);
