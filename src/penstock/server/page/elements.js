// Elements, words and charts: what views are made of. Data reaches the document as text only, never as markup.

// Making elements

export function make(tag, attributes = {}, ...children) {
  const element = tag.includes(":")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const svg = (tag, attributes, ...children) => make(`svg:${tag}`, attributes, ...children);
export const card = (title, ...children) => make("section", { class: "card" }, title && make("h2", {}, title), ...children);
export const badge = (text, kind) => make("span", { class: `badge ${kind}` }, text);
export const button = (text, act, attributes = {}) => make("button", { type: "button", onclick: act, ...attributes }, text);

// Words and numbers

export const count = (number) => (number === null || number === undefined ? "–" : Math.round(number).toLocaleString("en"));

export function bytes(number) {
  if (number === null || number === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) [number, unit] = [number / 1024, unit + 1];
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

export function seconds(number) {
  if (number === null || number === undefined) return "–";
  if (number < 59.5) return `${number < 10 ? number.toFixed(1) : Math.round(number)} s`;
  const whole = Math.round(number);
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole % 60 && whole < 600 ? ` ${whole % 60} s` : ""}`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} days`;
}

export const milliseconds = (number) => (number < 1 ? `${Math.max(1, Math.round(number * 1000))} ms` : seconds(number));
export const lagText = (lag) => (lag ? (lag.bytes ? `${bytes(lag.bytes)}, ${seconds(lag.seconds)}` : "none") : "unknown");
const clock = (at, parts = {}) => new Date(at).toLocaleTimeString("sv", { hour: "2-digit", minute: "2-digit", ...parts });
export const moment = (text) => {
  if (!text) return "";
  const today = new Date(text).toDateString() === new Date().toDateString();
  return `${today ? "today" : new Date(text).toLocaleDateString("sv")} ${clock(text, { second: "2-digit" })}`;
};
export const shortType = (type) => (type || "").split(/[:.]/).pop();

// What stands between backticks is code.
export const prose = (text) => (text || "").split("`").map((part, number) => (number % 2 ? make("code", {}, part) : part));
const PHASES = {
  ready: "good", errored: "bad", init: "warn", data_sync: "info", finished_copy: "info", sync_wait: "info",
  catchup: "info", sync_done: "info",
};
export const PHASE_NAMES = {
  ready: "ready", errored: "stopped", init: "waiting", data_sync: "copying", finished_copy: "copied",
  sync_wait: "catching up", catchup: "catching up", sync_done: "catching up",
};
export const STATES = { streaming: "good", paused: "warn", waiting: "warn", stopped: "bad" };
export const phaseBadge = (phase) => badge(PHASE_NAMES[phase] || phase, PHASES[phase] || "info");

// Charts

export function chart(title, series, format, label, least) {
  const [width, height, left, bottom] = [560, 190, 58, 20];
  const points = series.flatMap((each) => each.points);
  const most = Math.max(...points.map((point) => point[1] || 0), least); // no scale of hundredths for a quiet pipeline
  const top = niceTop(most);
  const last = Date.now() / 1000, first = Math.min(last - 300, ...points.map((point) => point[0]));
  const x = (at) => left + ((at - first) / (last - first)) * (width - left - 6);
  const y = (value) => 8 + (1 - value / top) * (height - bottom - 8);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    drawing.append(svg("line", { class: "rule", x1: left, x2: width, y1: y(top * share), y2: y(top * share) }),
      svg("text", { x: left - 8, y: y(top * share) + 4, "text-anchor": "end" }, format(top * share)));
  }
  const ends = [[first, "start"], [(first + last) / 2, "middle"], [last, "end"]];
  for (const [at, anchor] of ends) {
    const text = clock(at * 1000);
    drawing.append(svg("text", { x: x(at), y: height - 3, "text-anchor": anchor }, text));
  }
  series.forEach((each, number) => {
    for (const part of unbroken(each.points)) {
      const line = part.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" L");
      const from = x(part[0][0]), to = x(part[part.length - 1][0]);
      drawing.append(svg("path", { class: `area series-${number % 3}`, d: `M${from},${y(0)} L${line} L${to},${y(0)} Z` }),
        svg("path", { class: `line series-${number % 3}`, d: `M${line}` }));
    }
  });
  const cursor = svg("line", { class: "cursor", y1: 8, y2: height - bottom, visibility: "hidden" });
  drawing.append(cursor);
  const legend = make("div", { class: "legend" });
  const showAt = (at) => legend.replaceChildren(
    ...series.map((each, number) => make("span", { class: `mark series-${number % 3}` },
      `${each.name} ${format(nearest(each.points, at))}`)),
    at === null ? "" : make("i", {}, clock(at * 1000, { second: "2-digit" })));
  showAt(null);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * width;
    const at = first + ((place - left) / (width - left - 6)) * (last - first);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", at >= first ? "visible" : "hidden");
    showAt(Math.min(Math.max(at, first), last));
  });
  drawing.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    showAt(null);
  });
  return card(title, make("div", { class: "chart" }, points.length ? drawing : make("p", { class: "empty" }, "No samples yet."), legend));
}

function niceTop(most) {
  const step = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((each) => each * step).find((each) => each >= most) || most;
}

function unbroken(points) {
  const parts = [[]];
  for (const point of points) {
    const part = parts[parts.length - 1];
    const gap = part.length && point[0] - part[part.length - 1][0] > 20;
    if (point[1] === null || gap) parts.push([]);
    if (point[1] !== null) parts[parts.length - 1].push(point);
  }
  return parts.filter((part) => part.length);
}

function nearest(points, at) {
  if (at === null || !points.length) return points.length ? points[points.length - 1][1] : null;
  return points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best))[1];
}
