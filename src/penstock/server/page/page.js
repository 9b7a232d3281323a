// The page of a pipeline. Data reaches the document as text only, never as markup: names of tables are other people's.

const API = "/api/v1";
const POLL_MS = 5000;
const main = document.getElementById("main");
const byId = (id) => document.getElementById(id);

let now = null; // the last moment, from the stream
let pipeline = null; // the summary, every few seconds
let token = sessionStorage.getItem("penstock-token") || "";
let view = null; // the view on the screen: {update, poll}
let lastHealth = "";

// Making elements

function make(tag, attributes = {}, ...children) {
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

const svg = (tag, attributes, ...children) => make(`svg:${tag}`, attributes, ...children);
const card = (title, ...children) => make("section", { class: "card" }, title && make("h2", {}, title), ...children);
const badge = (text, kind) => make("span", { class: `badge ${kind}` }, text);
const button = (text, act, attributes = {}) => make("button", { type: "button", onclick: act, ...attributes }, text);

// Words and numbers

const count = (number) => (number === null || number === undefined ? "–" : Math.round(number).toLocaleString("en"));

function bytes(number) {
  if (number === null || number === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) [number, unit] = [number / 1024, unit + 1];
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

function seconds(number) {
  if (number === null || number === undefined) return "–";
  if (number < 59.5) return `${number < 10 ? number.toFixed(1) : Math.round(number)} s`;
  const whole = Math.round(number);
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole % 60 && whole < 600 ? ` ${whole % 60} s` : ""}`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} days`;
}

const lagText = (lag) => (lag ? (lag.bytes ? `${bytes(lag.bytes)}, ${seconds(lag.seconds)}` : "none") : "unknown");
const clock = (at, parts = {}) => new Date(at).toLocaleTimeString("sv", { hour: "2-digit", minute: "2-digit", ...parts });
const moment = (text) => {
  if (!text) return "";
  const today = new Date(text).toDateString() === new Date().toDateString();
  return `${today ? "today" : new Date(text).toLocaleDateString("sv")} ${clock(text, { second: "2-digit" })}`;
};
const shortType = (type) => (type || "").split(/[:.]/).pop();

// What stands between backticks is code.
const prose = (text) => (text || "").split("`").map((part, number) => (number % 2 ? make("code", {}, part) : part));
const PHASES = {
  ready: "good", errored: "bad", init: "warn", data_sync: "info", finished_copy: "info", sync_wait: "info",
  catchup: "info", sync_done: "info",
};
const PHASE_NAMES = {
  ready: "ready", errored: "stopped", init: "waiting", data_sync: "copying", finished_copy: "copied",
  sync_wait: "catching up", catchup: "catching up", sync_done: "catching up",
};
const STATES = { streaming: "good", paused: "warn", waiting: "warn", stopped: "bad" };
const phaseBadge = (phase) => badge(PHASE_NAMES[phase] || phase, PHASES[phase] || "info");

// Talking to the server

async function read(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}`, ...options.headers } : options.headers;
  const response = await fetch(`${API}${path}`, { cache: "no-store", ...options, headers });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(body.error || response.statusText), { status: response.status, ...body });
  return body;
}

function say(text, kind = "") {
  const line = make("p", { class: kind }, text);
  byId("said").append(line);
  setTimeout(() => line.remove(), kind ? 12000 : 6000);
}

function ask(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "cancel";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
    dialog.showModal();
  });
}

async function unlock() {
  byId("token").value = "";
  if (!(await ask(byId("token-dialog")))) return Boolean(token);
  token = byId("token").value.trim();
  sessionStorage.setItem("penstock-token", token);
  showLock();
  return Boolean(token);
}

function showLock() {
  byId("unlock").hidden = !(pipeline && pipeline.actions);
  byId("unlock").textContent = token ? "Lock actions" : "Unlock actions";
}

function lock() {
  token = "";
  sessionStorage.removeItem("penstock-token");
  showLock();
}

async function act(title, text, path, body) {
  if (pipeline && !pipeline.actions) {
    say("Actions are not enabled: set server.token in the config.", "bad");
    return;
  }
  if (!token && !(await unlock())) return;
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  if (!(await ask(byId("confirm-dialog")))) return;
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await read(path, { method: "POST", headers, body: JSON.stringify(body) });
    const pending = (answer.commands || []).some((each) => each.status !== "done");
    say(pending ? `${title}: accepted, it runs after the current batch` : `${title}: done`);
  } catch (error) {
    if (error.status === 401) lock();
    const refused = (error.commands || []).map((each) => each.reason).filter(Boolean).join("; ");
    say([`${title}: ${refused || error.message}`, error.hint].filter(Boolean).join(". "), "bad");
  }
  if (view && view.poll) view.poll();
}

const command = (kind, targets = {}) => ["/commands", { kind, ...targets }];
const WORDS = {
  resync: ["Copy again", (table) => `${table} is copied again from the start. Other tables are not affected.`],
  rollback: ["Resume", (table) => `${table} resumes where it stopped. Do this when the cause is fixed.`],
  pause: ["Pause", (output) => `${output} stops writing until you resume it. The server retains WAL meanwhile.`],
  resume: ["Resume", (output) => `${output} continues to write.`],
};

function tableButton(kind, table, output) {
  const [title, text] = WORDS[kind];
  const run = () => act(`${title} ${table}`, text(table), ...command(kind, { tables: [table], output }));
  return button(title, run, { "aria-label": `${title} ${table}` });
}

function remedyButton(error) {
  if (error.command === "quarantine_retry") {
    const run = () => act(`Retry ${error.index}`, "All quarantined documents are built and sent again.",
      `/indexes/${encodeURIComponent(error.index)}/quarantine/retry`, {});
    return button("Retry documents", run);
  }
  return WORDS[error.command] && error.table ? tableButton(error.command, error.table, error.output) : null;
}

// Charts

function chart(title, series, format, label) {
  const [width, height, left, bottom] = [560, 190, 58, 20];
  const points = series.flatMap((each) => each.points);
  const most = Math.max(...points.map((point) => point[1] || 0), 1e-9);
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

// The overview

function pipe() {
  return svg("svg", { class: "pipe", viewBox: "0 0 34 16", "aria-hidden": "true" },
    svg("line", { x1: 4, x2: 24, y1: 8, y2: 8 }), svg("line", { class: "water", x1: 4, x2: 24, y1: 8, y2: 8 }),
    svg("path", { class: "head", d: "M23 2 L32 8 L23 14 Z" }));
}

function node(title, big, sub, kind) {
  return make("div", { class: `node ${kind || ""}` }, make("h3", {}, title), make("div", { class: "big" }, big),
    ...[].concat(sub).filter(Boolean).map((each) => make("div", { class: "sub" }, each)));
}

function flow() {
  const source = (pipeline && pipeline.source) || {};
  const capturing = now.capture.state === "streaming";
  const stopped = source.error || source.unreachable_since;
  const kinds = (pipeline && pipeline.destinations) || {};
  const branches = now.outputs.map((each) => make("div", { class: `branch ${each.changes_per_second > 0 ? "flowing" : ""}` },
    node(`Apply · ${each.output}`, `${count(each.changes_per_second)} changes/s`, [`lag ${lagText(each.applied_lag)}`], STATES[each.state]),
    pipe(),
    node(`Destination · ${shortType(kinds[each.output]) || each.output}`, each.state, [
      each.reason || phasesText(each.phases), `acknowledged lag ${lagText(each.acknowledged_lag)}`], STATES[each.state])));
  const moving = now.outputs.some((each) => each.changes_per_second > 0) ? "flowing" : "";
  return make("ol", { class: "flow", "aria-label": "Flow of changes from the source to the destinations" },
    make("li", { class: moving }, node("Source", stopped ? "unreachable" : `PostgreSQL ${source.version || ""}`,
      [source.position && `at ${source.position}`, now.wal && `${bytes(now.wal.used)} of WAL retained`], stopped ? "bad" : "good"), pipe()),
    make("li", { class: moving }, node("Capture", now.capture.state || "starting", `lag ${lagText(now.capture.lag)}`, capturing ? "good" : "warn"), pipe()),
    make("li", { class: moving }, node("Spool", now.spool ? bytes(now.spool.used) : "–", now.spool && `${bytes(now.spool.left)} left`,
      pipeline && pipeline.spool && pipeline.spool.is_short ? "bad" : "good"), pipe()),
    make("li", { class: "outputs" }, make("div", { class: "branches" }, branches)));
}

function phasesText(phases) {
  const total = Object.values(phases).reduce((sum, each) => sum + each, 0);
  if (!total) return "";
  const others = Object.entries(phases).filter(([name]) => name !== "ready").map(([name, each]) => `${each} ${PHASE_NAMES[name] || name}`);
  return [`${phases.ready || 0} of ${total} tables ready`, ...others].join(", ");
}

function figures() {
  const rate = now.outputs.reduce((sum, each) => sum + each.changes_per_second, 0);
  const lags = now.outputs.map((each) => each.applied_lag).filter(Boolean);
  const worst = lags.length ? lags.reduce((one, other) => (other.seconds > one.seconds ? other : one)) : null;
  const slot = pipeline && pipeline.source.slot;
  const room = (each) => (each && each.seconds_left ? `lasts about ${seconds(each.seconds_left)}` : each ? `${bytes(each.left)} left` : "");
  const figure = (name, value, more) => make("div", { class: "figure" }, make("dt", {}, name), make("dd", {}, value, make("small", {}, more || "\u00a0")));
  return make("dl", { class: "figures" },
    figure("Changes per second", count(rate), `${count(now.outputs.reduce((sum, each) => sum + each.changes, 0))} since the start`),
    figure("Lag", worst ? seconds(worst.seconds) : "unknown", worst && bytes(worst.bytes)),
    figure("WAL on the server", now.wal ? bytes(now.wal.used) : bytes(slot && slot.retained_bytes), room(slot && slot.room)),
    figure("Spool", now.spool ? bytes(now.spool.used) : "–", room(pipeline && pipeline.spool)));
}

function problems(errors, limit = 8) {
  if (!errors.length) return null;
  const rows = errors.slice(0, limit).map((error) => make("div", { class: "problem" },
    make("b", {}, error.table ? make("a", { href: tableLink(error.output, error.table) }, error.table)
      : error.index ? `Index ${error.index}` : error.what === "output" ? `Output ${error.output}` : error.what === "source" ? "Source" : "Pipeline",
    error.since && make("span", { class: "when" }, ` since ${moment(error.since)}`)),
    make("p", {}, prose(error.reason)), error.solution && make("p", {}, prose(error.solution)),
    make("div", { class: "actions" }, remedyButton(error))));
  const more = errors.length > limit && make("p", { class: "empty" }, make("a", { href: "#/tables" }, `and ${errors.length - limit} more`));
  return card(`Needs attention (${errors.length})`, ...rows, more);
}

function overview() {
  const places = ["title", "problems", "flow", "figures", "charts"].map((name) => make("div", { "data-place": name }));
  const [title, trouble, drawn, numbers, charts] = places;
  main.replaceChildren(...places);
  let actions = "";
  const update = () => {
    if (!now) return;
    const several = now.outputs.length > 1;
    const wanted = now.outputs.map((each) => `${each.output} ${each.state}`).join();
    if (wanted !== actions) {
      // Only if something changed: a button that is replaced loses the focus.
      actions = wanted;
      title.replaceChildren(make("div", { class: "title" }, make("h1", {}, "Overview"), make("div", { class: "actions" },
        now.outputs.filter((each) => each.state !== "stopped").map((each) => {
          const kind = each.state === "paused" ? "resume" : "pause";
          const [name, text] = WORDS[kind];
          return button(several ? `${name} ${each.output}` : name,
            () => act(`${name} ${each.output}`, text(each.output), ...command(kind, { output: each.output })));
        }))));
    }
    drawn.replaceChildren(card("", flow()));
    numbers.replaceChildren(figures());
  };
  const poll = async () => {
    const [found, past] = await Promise.all([read("/errors"), read("/history")]);
    const shown = JSON.stringify(found.errors);
    if (trouble.dataset.shown !== shown) {
      trouble.dataset.shown = shown;
      trouble.replaceChildren(...[problems(found.errors)].filter(Boolean));
    }
    const names = [...new Set(past.history.flatMap((each) => Object.keys(each.outputs)))];
    const series = (pick) => names.map((name) => ({
      name, points: past.history.map((each) => [each.at, each.outputs[name] ? each.outputs[name][pick] : null]) }));
    const rates = series("changes_per_second"), lags = series("lag_seconds");
    const peak = (all) => Math.max(0, ...all.flatMap((each) => each.points.map((point) => point[1] || 0)));
    charts.replaceChildren(make("div", { class: "grid" },
      chart("Changes per second, last hour", rates, count, `Changes per second over the last hour; the peak is ${count(peak(rates))}`),
      chart("Lag, last hour", lags, seconds, `Lag over the last hour; the peak is ${seconds(peak(lags))}`)));
  };
  return { update, poll };
}

// Tables

const tableLink = (output, table) => `#/tables/${encodeURIComponent(output)}/${encodeURIComponent(table)}`;

function copyBar(copy) {
  if (!copy) return null;
  const bar = make("i");
  bar.style.width = `${Math.round(copy.fraction * 100)}%`;
  return make("div", {}, make("div", { class: "bar", role: "progressbar", "aria-label": "copied", "aria-valuenow": Math.round(copy.fraction * 100),
    "aria-valuemin": 0, "aria-valuemax": 100 }, bar), make("small", {}, `${Math.round(copy.fraction * 100)}%, ${count(copy.rows_done)} rows`));
}

function tables() {
  const query = { search: "", phase: "", sort: "phase", descending: "", limit: 200 };
  const chips = make("div", { class: "chips", role: "group", "aria-label": "Phase" });
  const found = make("span", { class: "crumb", role: "status" });
  const head = make("tr"), body = make("tbody");
  const more = button("Show more", () => { query.limit += 200; poll(); }, { hidden: true });
  const search = make("input", { type: "search", placeholder: "Search tables", "aria-label": "Search tables",
    oninput: () => { query.search = search.value; query.limit = 200; clearTimeout(search.timer); search.timer = setTimeout(poll, 150); } });
  const columns = [["table", "Table"], ["phase", "Phase"], ["rows", "Rows", 1], ["bytes", "Size", 1], ["lag_bytes", "Lag", 1], ["", ""]];
  main.replaceChildren(make("div", { class: "title" }, make("h1", {}, "Tables"), found),
    card("", make("div", { class: "tools" }, search, chips), make("div", { class: "scroll" },
      make("table", {}, make("thead", {}, head), body)), make("div", { class: "tools" }, more)));
  const drawHead = () => head.replaceChildren(...columns.map(([name, text, number]) => make("th", {
    scope: "col", class: number && "number",
    "aria-sort": query.sort === name ? (query.descending ? "descending" : "ascending") : null,
  }, name ? button(text, () => {
    query.descending = query.sort === name && !query.descending ? "1" : "";
    query.sort = name;
    drawHead();
    poll().then(() => head.querySelector("[aria-sort] button").focus());
  }) : make("span", {}, make("span", { class: "hidden" }, "Actions")))));
  drawHead();
  let shown = "", latest = 0;
  const poll = async () => {
    const call = ++latest;
    const wanted = Object.entries(query).filter(([, value]) => value !== "");
    const answer = await read(`/tables?${new URLSearchParams(wanted)}`);
    if (call !== latest || JSON.stringify(answer) === shown) return; // an older answer, or nothing new
    shown = JSON.stringify(answer);
    const several = new Set(answer.tables.map((each) => each.output)).size > 1;
    found.textContent = `${count(answer.found)} of ${count(answer.total)}`;
    const pressed = (phase) => ({ "aria-pressed": String(query.phase === phase) });
    const choose = (phase) => () => { query.phase = phase; query.limit = 200; poll(); };
    chips.replaceChildren(button("All", choose(""), pressed("")), ...Object.entries(answer.phases).sort().map(([phase, number]) =>
      button(`${PHASE_NAMES[phase] || phase} ${count(number)}`, choose(phase), pressed(phase))));
    body.replaceChildren(...answer.tables.map((each) => make("tr", {},
      make("td", { class: "name" }, make("a", { href: tableLink(each.output, each.table) }, each.table),
        several && make("p", {}, each.output), each.error && make("p", { class: "reason" }, each.error.reason),
        each.error && each.error.solution && make("p", {}, prose(each.error.solution))),
      make("td", {}, phaseBadge(each.phase), copyBar(each.copy)),
      make("td", { class: "number" }, each.rows === null ? "–" : `~${count(each.rows)}`),
      make("td", { class: "number" }, bytes(each.bytes)), make("td", { class: "number" }, bytes(each.lag_bytes)),
      make("td", {}, each.error && remedyButton({ ...each.error, table: each.table, output: each.output })))));
    if (!answer.tables.length) body.replaceChildren(make("tr", {}, make("td", { colspan: 6, class: "empty" }, "No table matches.")));
    more.hidden = answer.tables.length >= answer.found;
  };
  return { poll };
}

function table(output, name) {
  main.replaceChildren(make("h1", {}, name));
  let shown = "";
  const poll = async () => {
    const answer = await read(`/tables/${name.split("/").map(encodeURIComponent).join("/")}?output=${encodeURIComponent(output)}`);
    if (JSON.stringify(answer) === shown) return;
    shown = JSON.stringify(answer);
    const each = answer.table;
    const facts = [["Output", each.output], ["Position", each.position || "–"], ["Rows at the source", each.rows === null ? "–" : `~${count(each.rows)}`],
      ["Size at the source", bytes(each.bytes)], ["Lag", bytes(each.lag_bytes)], ["Copied again because", each.copied_because],
      ["Changed cells", each.changed_cells || null], ["Not in the stream", each.silent_change]].filter((fact) => fact[1] !== null);
    const schema = answer.schemas[0];
    main.replaceChildren(
      make("div", {}, make("p", { class: "crumb" }, make("a", { href: "#/tables" }, "Tables"), " / ", output),
        make("div", { class: "title" }, make("h1", {}, name), phaseBadge(each.phase),
          make("div", { class: "actions" }, tableButton("resync", name, output), each.error && each.error.command === "rollback" && tableButton("rollback", name, output)))),
      each.error ? problems([{ what: "table", table: name, output, ...each.error }]) : "",
      make("div", { class: "grid" },
        card("Now", make("dl", { class: "facts" }, facts.flatMap(([label, value]) => [make("dt", {}, label), make("dd", {}, String(value))])), copyBar(each.copy)),
        card("History of phases", make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, answer.history.slice(0, 30).map((past) => make("tr", {},
          make("td", {}, make("time", { datetime: past.at }, moment(past.at))), make("td", {}, phaseBadge(past.phase)), make("td", { class: "text" }, past.reason || ""))))))),
        card(`Columns${answer.schemas.length > 1 ? ` (version ${answer.schemas.length})` : ""}`, schema ? make("div", { class: "scroll" }, make("table", {},
          make("thead", {}, make("tr", {}, ["Column", "Type"].map((text) => make("th", { scope: "col" }, make("span", {}, text))))),
          make("tbody", {}, schema.columns.map((column) => make("tr", {}, make("td", { class: "name" }, column.name, column.key && make("span", { class: "crumb" }, " key")),
            make("td", { class: "mono" }, column.type)))))) : make("p", { class: "empty" }, "Not copied yet."))));
  };
  return { poll };
}

// Documents and events

function documents() {
  main.replaceChildren(make("h1", {}, "Documents"));
  let shown = "";
  const poll = async () => {
    const { indexes } = await read("/indexes");
    const held = {};
    for (const each of token ? indexes.filter((index) => index.quarantined) : []) {
      held[each.index] = (await read(`/indexes/${encodeURIComponent(each.index)}/quarantine`)).documents;
    }
    if (JSON.stringify([indexes, held, token]) === shown) return;
    shown = JSON.stringify([indexes, held, token]);
    const rows = indexes.map((each) => make("tr", {},
      make("td", { class: "name" }, each.index, make("p", {}, `from ${each.table}`), each.reason && make("p", {}, `last build: ${each.reason}`)),
      make("td", {}, badge(each.status, each.seeded ? "good" : each.status === "filling" ? "info" : "warn"),
        each.backfill && copyBar({ fraction: each.backfill.fraction, rows_done: each.backfill.documents_written })),
      make("td", { class: "mono" }, each.generation || each.fingerprint.slice(0, 8)),
      make("td", { class: "number" }, each.quarantined ? badge(count(each.quarantined), "bad") : "0"),
      make("td", {}, make("div", { class: "actions" },
        button("Rebuild", () => act(`Rebuild ${each.index}`, "The index is built again beside the one that serves, and takes its place when it is complete.", ...command("rebuild_index", { indexes: [each.index] }))),
        each.quarantined > 0 && remedyButton({ command: "quarantine_retry", index: each.index })))));
    const header = ["Index", "Status", "Generation", "Quarantined", ""];
    main.replaceChildren(make("h1", {}, "Documents"), card("Indexes", indexes.length ? make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, header.map((text) => make("th", { scope: "col", class: text === "Quarantined" && "number" }, make("span", {}, text || make("span", { class: "hidden" }, "Actions")))))),
      make("tbody", {}, rows))) : make("p", { class: "empty" }, "This pipeline has no search indexes.")),
    ...indexes.filter((each) => each.quarantined).map((each) => card(`Quarantine of ${each.index}`, held[each.index]
      ? make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, held[each.index].slice(0, 200).map((document) => make("tr", {},
        make("td", { class: "mono" }, document.id), make("td", {}, document.reason), make("td", { class: "number" }, `${document.attempts}×`),
        make("td", {}, make("time", { datetime: document.last_at }, moment(document.last_at))))))))
      : make("p", {}, "The ids of documents are values of keys: ", button("Unlock actions", async () => { if (await unlock()) poll(); }), " to see them."))));
  };
  return { poll };
}

function events() {
  main.replaceChildren(make("h1", {}, "Events"));
  let shown = "";
  const poll = async () => {
    const [happened, sent, compared] = await Promise.all([read("/events"), read("/commands"), read("/verifications")]);
    if (JSON.stringify([happened, sent, compared]) === shown) return;
    shown = JSON.stringify([happened, sent, compared]);
    const time = (at) => make("td", {}, make("time", { datetime: at }, moment(at)));
    const KINDS = { stopped: "bad", waiting: "warn", copied: "good", seeded: "good" };
    const list = (rows, none) => (rows.length ? make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, rows))) : make("p", { class: "empty" }, none));
    main.replaceChildren(make("h1", {}, "Events"),
      card("What happened", list(happened.events.map((each) => make("tr", {}, time(each.at), make("td", {}, badge(each.event, KINDS[each.event] || "info")),
        make("td", { class: "text" }, prose(each.text)))), "Nothing since the start.")),
      make("div", { class: "grid" },
        card("Commands", list(sent.commands.slice(0, 100).map((each) => make("tr", {}, time(each.requested_at),
          make("td", { class: "name" }, `${each.kind} ${each.tables.join(", ")}`, make("p", {}, `${each.output}, by ${each.requested_by}`), each.reason && make("p", { class: "reason" }, each.reason)),
          make("td", {}, badge(each.status, { done: "good", refused: "bad" }[each.status] || "info")))), "No commands yet.")),
        card("Comparisons with the source", list(compared.verifications.map((each) => make("tr", {}, time(new Date(each.at * 1000).toISOString()),
          make("td", { class: "name" }, Object.entries(each.outputs).map(([name, result]) => make("p", {},
            `${name}: ${Object.entries(result.tables).map(([kind, number]) => `${number} ${kind}`).join(", ")}${result.different.length ? `: ${result.different.join(", ")}` : ""}`))),
          make("td", {}, badge(each.result, { equal: "good", different: "bad" }[each.result] || "warn")))), "Run penstock verify to compare."))));
  };
  return { poll };
}

// Going from view to view

const VIEWS = { "": overview, tables, documents, events };

function route(event) {
  const [name, output, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  view = name === "tables" && output ? table(output, rest.join("/")) : (VIEWS[name] || overview)();
  const current = VIEWS[name] ? name || "overview" : "overview";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (event) main.focus();
  window.scrollTo(0, 0);
  if (view.update) view.update();
  refresh();
}

async function refresh() {
  const shown = view;
  try {
    pipeline = await read("/pipeline");
    byId("pipeline").textContent = pipeline.pipeline;
    byId("source").textContent = pipeline.source.location;
    document.title = `${pipeline.pipeline} · Penstock`;
    byId("count-tables").textContent = count(pipeline.outputs.reduce((sum, each) => sum + each.tables, 0));
    byId("count-documents").textContent = pipeline.outputs.reduce((sum, each) => sum + each.indexes, 0) || "";
    showLock();
    if (shown.poll && shown === view) await shown.poll();
  } catch (error) {
    if (error.status === 404 && shown === view) main.replaceChildren(make("h1", {}, "Not found"), make("p", {}, error.message));
    else if (error.status === 401) lock();
    else if (error.status) say(error.message, "bad");
  }
}

function showHealth() {
  const [text, kind] = now.ready ? ["ready", "good"] : [`not ready: ${now.unready.join("; ")}`, "bad"];
  const health = byId("health");
  health.className = `health ${kind}`;
  health.title = text;
  const short = text.length > 60 ? `${text.slice(0, 58)}…` : text;
  if (short !== lastHealth) health.textContent = lastHealth = short; // screen readers say it only if it changed
}

function follow() {
  const stream = new EventSource(`${API}/stream`);
  stream.addEventListener("now", (event) => {
    now = JSON.parse(event.data);
    byId("lost").hidden = true;
    document.body.classList.remove("old");
    showHealth();
    if (view && view.update && !document.hidden) view.update();
  });
  stream.addEventListener("error", () => {
    byId("lost").hidden = false;
    document.body.classList.add("old");
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
  });
}

byId("unlock").addEventListener("click", () => (token ? lock() : unlock()));
window.addEventListener("hashchange", route);
route();
follow();
setInterval(() => { if (!document.hidden) refresh(); }, POLL_MS);
