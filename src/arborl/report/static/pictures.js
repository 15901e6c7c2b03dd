"use strict";
// The evaluations' pictures: the same prompts and the same noise, before and after.

const sheetView = { epoch: null }; // null follows the newest

function picturesSection(host, data) {
  const { sheets } = data;
  if (!sheets.length) return false;
  const grid = h("div", { class: "pairs" }), said = h("output", {});
  const first = sheets[0];
  if (sheets.length === 1) {
    host.append(h("p", { class: "note" }, `The evaluation after ${first.epoch} epochs.`), grid);
    grid.append(...first.pictures.map((picture) => pair([picture], [])));
    return true;
  }
  const show = (index) => {
    sheetView.epoch = index === sheets.length - 1 ? null : sheets[index].epoch;
    const now = sheets[index];
    said.textContent = `before, and after ${now.epoch} epochs; the same noise`;
    slider.setAttribute("aria-valuetext", `after ${now.epoch} epochs`);
    grid.replaceChildren(...now.pictures.map((picture, i) => pair([first.pictures[i], picture], ["before", `after ${now.epoch}`])));
  };
  const slider = h("input", {
    type: "range", min: 1, max: sheets.length - 1, id: "sheet-epoch", "data-focus": "sheet-epoch",
    "aria-label": "evaluation", disabled: sheets.length < 3, oninput: () => show(Number(slider.value)),
  });
  host.append(h("div", { class: "controls" }, slider, said), grid);
  if (data.sheets_recorded > sheets.length) {
    host.append(h("p", { class: "note" }, `${sheets.length} of ${data.sheets_recorded} evaluations, evenly chosen.`));
  }
  const chosen = Math.max(1, nearest(sheets, sheetView.epoch));
  slider.value = chosen;
  show(chosen);
  return true;
}

/** Pictures of one prompt side by side, with their scores. */
function pair(pictures, names) {
  names = names.filter((_, i) => pictures[i]);
  const present = pictures.filter(Boolean);
  const rewards = Object.keys(present[0].scores).filter((name) => !name.includes("/"));
  return h("figure", { class: "pair" },
    h("div", { class: "sides" }, present.map((picture, i) => h("div", {}, h("img", { src: picture.src, alt: `${names[i] || ""} ${picture.prompt}`.trim() }),
      h("small", {}, names[i] || "")))),
    h("figcaption", {}, ...rewards.map((name) => h("span", { class: "score" }, h("b", {}, name), " ",
      present.map((picture) => num(picture.scores[name], 3)).join(" → "))), h("span", { class: "prompt" }, present[0].prompt)));
}
