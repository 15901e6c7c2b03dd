"use strict";
// What a run says (prompts, names, settings) is anyone's text. It is set as text or as an attribute, never as markup.

/** An element. `on…` properties are listeners, null ones are left out, children are elements or text. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return element;
}

/** A number for people: five digits, or as many as told. */
function num(value, digits = 5) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function plusMinus(value, error) {
  return error === null || error === undefined ? num(value) : `${num(value)} ± ${num(error, 2)}`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 120) return `${num(value, 3)} s`;
  return value < 7200 ? `${num(value / 60, 3)} min` : `${num(value / 3600, 3)} h`;
}

function count(value) {
  return value >= 1e6 ? `${num(value / 1e6, 3)} M` : value >= 1e4 ? `${num(value / 1e3, 3)} k` : num(value);
}

/** Sections are drawn anew when there is new data, or another width to draw into. */
const page = { data: null, sections: [] };

function section(id, title, draw) {
  page.sections.push({ id, title, draw });
}

function drawAll(data) {
  page.data = data;
  const main = document.getElementById("main");
  const focused = document.activeElement?.dataset?.focus;
  const opened = new Set([...main.querySelectorAll("details[open]")].map((details) => details.dataset.focus));
  main.querySelector("noscript")?.remove();
  for (const { id, title, draw } of page.sections) {
    let host = document.getElementById(id);
    if (!host) {
      host = h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), h("div", { class: "body" }));
      main.append(host);
    }
    const body = host.querySelector(".body");
    body.style.minHeight = `${body.offsetHeight}px`; // so that the page does not jump while it is drawn
    body.replaceChildren();
    host.hidden = draw(body, data) === false;
    body.style.minHeight = "";
  }
  main.querySelectorAll("details").forEach((details) => (details.open = opened.has(details.dataset.focus)));
  const shown = page.sections.filter(({ id }) => !document.getElementById(id).hidden);
  document.getElementById("places").replaceChildren(...shown.map(({ id, title }) => h("a", { href: `#${id}` }, title)));
  if (focused) document.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function start(drawHead) {
  const redraw = (data) => {
    drawHead(document.getElementById("head"), data);
    drawAll(data);
  };
  document.getElementById("head").after(h("nav", { id: "places", "aria-label": "sections" }));
  redraw(JSON.parse(document.getElementById("data").textContent));
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(document.body.clientWidth - width) < 2) return;
    width = document.body.clientWidth;
    drawAll(page.data);
  }).observe(document.body);
  if (document.body.dataset.live === "yes") follow(redraw);
}

/** Ask the server that sent this page for what is new, as long as it answers. */
function follow(redraw) {
  const state = h("span", { role: "status" }, "live"), looked = h("span", {});
  document.getElementById("head").after(h("p", { class: "live" }, state, looked));
  let tag = null;
  const tell = (text, kind) => { // a screen reader speaks at every change
    if (state.textContent !== text) state.textContent = text;
    state.className = kind;
  };
  const ask = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (answer.status === 200) {
          tag = answer.headers.get("ETag");
          redraw(await answer.json());
        } else if (answer.status !== 304) throw new Error((await answer.text()).slice(0, 200));
        tell(page.data.finished ? "the run is finished" : "live", "");
        looked.textContent = `, looked at ${new Date().toLocaleTimeString()}`;
      } catch (error) {
        tell(`no news: ${error.message}`, "lost");
        looked.textContent = "";
      }
    }
    setTimeout(ask, 2000);
  };
  setTimeout(ask, 2000);
}
