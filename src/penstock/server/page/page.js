// The page of a pipeline. Data reaches the document as text only, never as markup: names of tables are other people's.

import {
  PHASE_NAMES, STATES, badge, button, bytes, card, chart, count, lagText, make, milliseconds, moment, phaseBadge, prose,
  seconds, shortType, svg,
} from "./elements.js";

const API = "/api/v1";
const POLL_MS = 5000;
const main = document.getElementById("main");
const byId = (id) => document.getElementById(id);

let now = null; // the last moment, from the stream
let pipeline = null; // the summary, every few seconds
let token = sessionStorage.getItem("penstock-token") || "";
let view = null; // the view on the screen: {update, poll}
let lastHealth = "";

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
    const began = answer.verifying ? "started; see Verify" : pending ? "accepted, it runs after the current batch" : "done";
    say(`${title}: ${began}`);
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

// Several phases have one name for people: [name, phases, number of tables], in the order of names.
function byName(phases) {
  return [...new Set(Object.values(PHASE_NAMES))].sort().map((name) => {
    const each = Object.keys(PHASE_NAMES).filter((phase) => PHASE_NAMES[phase] === name);
    return [name, each.join(), each.reduce((sum, phase) => sum + (phases[phase] || 0), 0)];
  });
}

function phasesText(phases) {
  const total = Object.values(phases).reduce((sum, each) => sum + each, 0);
  if (!total) return "";
  const others = byName(phases).filter(([name, , each]) => each && name !== "ready").map(([name, , each]) => `${count(each)} ${name}`);
  return [`${count(phases.ready || 0)} of ${count(total)} tables ready`, ...others].join(", ");
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
      chart("Changes per second, last hour", rates, count, `Changes per second over the last hour; the peak is ${count(peak(rates))}`, 10),
      chart("Lag, last hour", lags, seconds, `Lag over the last hour; the peak is ${seconds(peak(lags))}`, 1)));
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
    chips.replaceChildren(button("All", choose(""), pressed("")), ...byName(answer.phases)
      .filter(([, phases, number]) => number || phases === query.phase)
      .map(([name, phases, number]) => button(`${name} ${count(number)}`, choose(phases), pressed(phases))));
    body.replaceChildren(...answer.tables.map((each) => make("tr", {},
      make("td", { class: "name" }, make("a", { href: tableLink(each.output, each.table) }, each.table),
        several && make("p", {}, each.output), each.error && make("p", { class: "reason" }, each.error.reason),
        each.error && each.error.solution && make("p", {}, prose(each.error.solution))),
      make("td", {}, phaseBadge(each.phase), copyBar(each.copy)),
      make("td", { class: "number", "data-label": "Rows" }, each.rows === null ? "–" : `~${count(each.rows)}`),
      make("td", { class: "number", "data-label": "Size" }, bytes(each.bytes)),
      make("td", { class: "number", "data-label": "Lag" }, bytes(each.lag_bytes)),
      make("td", {}, each.error && remedyButton({ ...each.error, table: each.table, output: each.output })))));
    if (!answer.tables.length) body.replaceChildren(make("tr", {}, make("td", { colspan: 6, class: "empty" }, "No table matches.")));
    more.hidden = answer.tables.length >= answer.found;
  };
  return { poll };
}

const STAGES = { build: "read", job: "job", commit: "commit", record: "record" };

function batchList(batches) {
  if (!batches.length) return make("p", { class: "empty" }, "No changes since the start.");
  const rows = batches.map((each) => {
    const changes = Object.entries(each.operations).map(([name, number]) => `${count(number)} ${name}${number > 1 && !name.endsWith("s") ? "s" : ""}`);
    const stages = Object.entries(STAGES).filter(([name]) => each.stages[name] !== undefined)
      .map(([name, text]) => `${text} ${milliseconds(each.stages[name])}`);
    return make("tr", {}, make("td", {}, make("time", { datetime: each.at }, moment(each.at))),
      make("td", { class: "name" }, each.error ? badge(each.error, "bad") : changes.join(", "), make("p", {}, stages.join(" · "))),
      make("td", { class: "number" }, milliseconds(each.seconds), make("p", { class: "crumb" },
        each.after_commit === null ? "" : `${seconds(each.after_commit)} after commit`)));
  });
  return make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, rows)));
}

function table(output, name) {
  main.replaceChildren(make("h1", {}, name));
  let shown = "";
  const poll = async () => {
    const answer = await read(`/tables/${encodeURIComponent(name)}?output=${encodeURIComponent(output)}`);
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
          make("div", { class: "actions" }, verifyButton("Verify", { tables: [name], output }), tableButton("resync", name, output), each.error && each.error.command === "rollback" && tableButton("rollback", name, output)))),
      each.error ? problems([{ what: "table", table: name, output, ...each.error }]) : "",
      make("div", { class: "grid" },
        card("Now", make("dl", { class: "facts" }, facts.flatMap(([label, value]) => [make("dt", {}, label), make("dd", {}, String(value))])), copyBar(each.copy)),
        card("History of phases", make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, answer.history.slice(0, 30).map((past) => make("tr", {},
          make("td", {}, make("time", { datetime: past.at }, moment(past.at))), make("td", {}, phaseBadge(past.phase)), make("td", { class: "text" }, past.reason || "")))))))),
      card("Recent batches", batchList(answer.batches)),
      card(`Columns${answer.schemas.length > 1 ? ` (version ${answer.schemas.length})` : ""}`, schema ? make("div", { class: "scroll" }, make("table", {},
          make("thead", {}, make("tr", {}, ["Column", "Type"].map((text) => make("th", { scope: "col" }, make("span", {}, text))))),
          make("tbody", {}, schema.columns.map((column) => make("tr", {}, make("td", { class: "name" }, column.name, column.key && make("span", { class: "crumb" }, " key")),
            make("td", { class: "mono" }, column.type)))))) : make("p", { class: "empty" }, "Not copied yet.")));
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
    const [happened, sent] = await Promise.all([read("/events"), read("/commands")]);
    if (JSON.stringify([happened, sent]) === shown) return;
    shown = JSON.stringify([happened, sent]);
    const time = (at) => make("td", {}, make("time", { datetime: at }, moment(at)));
    const KINDS = { stopped: "bad", waiting: "warn", copied: "good", seeded: "good" };
    const list = (rows, none) => (rows.length ? make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, rows))) : make("p", { class: "empty" }, none));
    main.replaceChildren(make("h1", {}, "Events"),
      card("What happened", list(happened.events.map((each) => make("tr", {}, time(each.at), make("td", {}, badge(each.event, KINDS[each.event] || "info")),
        make("td", { class: "text" }, prose(each.text)))), "Nothing since the start.")),
      card("Commands", list(sent.commands.slice(0, 100).map((each) => make("tr", {}, time(each.requested_at),
          make("td", { class: "name" }, `${each.kind} ${each.tables.join(", ")}`, make("p", {}, `${each.output}, by ${each.requested_by}`), each.reason && make("p", { class: "reason" }, each.reason)),
          make("td", {}, badge(each.status, { done: "good", refused: "bad" }[each.status] || "info")))), "No commands yet.")));
  };
  return { poll };
}

// Comparisons with the source

const RESULTS = { equal: "good", different: "bad" };

function verifyButton(text, targets) {
  const what = targets.tables ? targets.tables.join(", ") : "all tables";
  const run = () => act(`Verify ${what}`, "Every row is compared with the source, in a process of its own at a low priority. Changes wait for a second or two; "
    + "at a destination without versions, such as Parquet, until the comparison ends.", "/verifications", targets);
  return button(text, run, { "aria-label": `Verify ${what}` });
}

function verifyProgress() {
  const each = now && now.verifying;
  if (!each) return null;
  const doing = { starting: "Starting…", waiting: `Waiting: ${each.text}`, held: "Bringing both sides to one position…" }[each.step]
    || `Comparing ${each.table || "…"}`;
  return card("", make("p", { class: "doing" }, make("b", {}, prose(doing)),
    ` ${each.compared ? `${count(each.compared)} done, ` : ""}for ${seconds(Math.max(0, now.at - each.since))}`),
    make("progress", { max: 1, value: each.step === "comparing" ? each.fraction : null, "aria-label": "Comparison of the current table" }),
    make("p", { class: "crumb" }, each.text && each.step !== "waiting" ? `${each.text}; ` : "", `asked by ${each.requested_by}`));
}

function unequalTable(output, each, rows) {
  const counts = ["missing", "extra", "changed", "unsettled", "equal"].filter((kind) => each[kind]).map((kind) => `${count(each[kind])} ${kind}`);
  const pairs = (key) => Object.entries(key).map(([name, value]) => `${name}=${value === null ? "NULL" : value}`).join(" ") || "one row";
  const columns = (each.columns || []).map((column) => {
    const sides = { missing: `(${column.source}) is missing at the destination`, extra: `(${column.destination}) exists only at the destination`,
      renamed: `is called ${column.destination} at the destination`, type: `is ${column.destination} at the destination, and should be ${column.source}` };
    return `column ${column.column} ${sides[column.kind]}`;
  });
  return make("tr", {}, make("td", { class: "name" }, make("a", { href: tableLink(output, each.table) }, each.table),
    make("p", {}, each.reason ? prose(each.reason) : counts.join(", ")), columns.map((text) => make("p", { class: "reason" }, text)),
    (each.not_compared || []).map((text) => make("p", {}, `not compared: ${text}`)),
    rows && rows.length > 0 && make("ul", { class: "keys mono" }, rows.map((row) =>
      make("li", {}, `${row.kind} ${pairs(row.key)}${row.columns.length ? `: ${row.columns.join(", ")}` : ""}`)))),
  make("td", { class: "number" }, badge(each.result, RESULTS[each.result] || "warn")));
}

function verify() {
  const all = make("span"), running = make("div", { role: "status" }), runs = make("div", { class: "runs" });
  main.replaceChildren(make("div", { class: "title" }, make("h1", {}, "Verify"), make("div", { class: "actions" }, all)), running, runs);
  const open = new Set(), keys = {};
  let shown = "", wasRunning = false;
  const oneRun = (each) => {
    const outputs = Object.entries(each.outputs);
    const summary = outputs.map(([name, found]) => `${name}: ${Object.entries(found.tables).map(([kind, number]) => `${count(number)} ${kind}`).join(", ") || "no tables"}`);
    const unequal = outputs.flatMap(([name, found]) => found.found.map((table) => {
      const known = keys[each.id] && keys[each.id].outputs[name].found.find((other) => other.table === table.table);
      return unequalTable(name, table, known && known.differences);
    }));
    const hidden = !keys[each.id] && outputs.some(([, found]) => found.found.some((table) => table.missing || table.extra || table.changed));
    const showKeys = async () => {
      if (!token && !(await unlock())) return;
      try {
        keys[each.id] = await read(`/verifications/${encodeURIComponent(each.id)}`);
      } catch (error) {
        if (error.status === 401) lock();
        say(error.message, "bad");
      }
      poll();
    };
    const details = make("details", { open: open.has(each.id), ontoggle: () => (details.open ? open.add(each.id) : open.delete(each.id)) },
      make("summary", {}, badge(each.result, RESULTS[each.result] || "warn"), make("time", { class: "when", datetime: new Date(each.at * 1000).toISOString() }, moment(each.at * 1000)),
        make("span", {}, each.reason || summary.join("; ")), make("span", { class: "crumb" }, `by ${each.requested_by || "unknown"}`)),
      outputs.map(([name, found]) => make("p", { class: "crumb" }, `${name}: at ${found.position || "–"}, ${count(found.rows.equal)} rows equal${found.sample && found.sample < 1 ? `, in a sample of ${found.sample * 100}%` : ""}`)),
      unequal.length ? make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, unequal))) : "",
      hidden && make("p", {}, "Keys of rows are values of cells: ", button("Show keys", showKeys)));
    return card("", details);
  };
  const update = () => {
    const progress = verifyProgress();
    running.replaceChildren(...[progress].filter(Boolean));
    const label = progress ? "running" : "idle";
    if (all.dataset.shown !== label) {
      all.dataset.shown = label;
      const start = verifyButton("Verify all tables", {});
      start.disabled = Boolean(progress);
      all.replaceChildren(start);
    }
    if (wasRunning && !progress) refresh();
    wasRunning = Boolean(progress);
  };
  const poll = async () => {
    const { verifications } = await read("/verifications");
    const wanted = JSON.stringify([verifications, Object.keys(keys)]);
    if (wanted === shown) return;
    shown = wanted;
    runs.replaceChildren(...(verifications.length ? verifications.map(oneRun) : [card("", make("p", { class: "empty" }, "No comparison yet."))]));
  };
  return { update, poll };
}

// Going from view to view

const VIEWS = { "": overview, tables, documents, verify, events };

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // an address that somebody typed
  }
}

function route(event) {
  const [name, output, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
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
