"use strict";
// What every page does: changes through the API with the session's token, contents that follow one event stream,
// times, tables that sort and filter. Nothing is kept here that the server does not say.
const eft = {
  root: document.body.dataset.root,
  token: document.querySelector("meta[name=csrf]")?.content,
  seen: [],        // numbers of the events that this page was told
  refreshed: 0,    // how often its contents were asked for again
  after: document.body.dataset.after || "",
  liveParts: {},   // id of a live part → what takes its fresh contents, where that is not the plain exchange
  heard: performance.now(),  // when the server last answered anything
};

eft.fetch = async (path, options = {}) => {
  const headers = { accept: "application/json", ...(options.headers || {}) };
  if (options.method && options.method !== "GET") headers["x-csrf-token"] = eft.token;
  const reply = await fetch(eft.root + path, { ...options, headers, credentials: "same-origin" });
  if (reply.status < 500) eft.back();
  if (reply.status === 401) eft.signedOut();
  return reply;
};

eft.tell = (text, kind = "bad", link) => {
  const banner = document.getElementById("banner");
  banner.className = `notice ${kind}`;
  banner.textContent = text;
  if (link) { const a = document.createElement("a"); a.href = link[1]; a.textContent = link[0]; banner.append(" ", a); }
  banner.hidden = !text;
};

eft.signedOut = () => {
  if (eft.over) return;  // told already: by the stream, or by a request
  eft.over = true;
  eft.stream?.close();
  const here = location.pathname.split("/ui/")[1] + location.search;
  eft.tell("You are signed out: the session ended, or its key was revoked. What is shown is no longer kept up to date.", "bad",
    ["Sign in again", `${eft.root}ui/signin?next=${encodeURIComponent(here)}`]);
};

eft.fault = async (reply) => {
  try { const { error } = await reply.json(); return error.message; } catch { return `the server answered ${reply.status}`; }
};

// A change: what differs is shown afterwards, or why it was refused. The reply, or null.
eft.send = async (path, method, body) => {
  const reply = await eft.fetch(path, { method, ...(body && { body: JSON.stringify(body), headers: { "content-type": "application/json" } }) });
  if (reply.ok) { eft.tell(""); eft.soon(0); return reply; }
  if (!eft.over) eft.tell(await eft.fault(reply));
  return null;
};

// Whether somebody is at a field, which keeps what is in it. A button or a log that has the keyboard takes what is new.
eft.typing = () => !!document.activeElement?.matches("input, select, textarea");

// -- contents: the page is asked for again, and what differs in its live parts is put in place
eft.refresh = async () => {
  if (eft.over || eft.busy) { eft.again = true; return; }
  eft.busy = true;
  try {
    const reply = await fetch(location.href, { credentials: "same-origin", redirect: "manual", signal: AbortSignal.timeout(60000) });
    if (reply.status < 500) eft.back();
    if (reply.type === "opaqueredirect" || reply.status === 401) return eft.signedOut();
    if (reply.status === 404) { eft.over = true; eft.stream?.close(); return eft.tell("This is no longer there: it was deleted.", "bad"); }
    if (!reply.ok) return;
    const fresh = new DOMParser().parseFromString(await reply.text(), "text/html");
    const held = document.activeElement?.closest("button")?.ariaLabel;
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (!next) continue;
      if (eft.liveParts[part.id]) { eft.liveParts[part.id](part, next); continue; }
      const scrolls = [...part.querySelectorAll(".log")].map((log) => log.scrollTop + log.clientHeight >= log.scrollHeight - 4);
      Idiomorph.morph(part, next, { ignoreActiveValue: eft.typing(), callbacks: { beforeAttributeUpdated: (name, node) =>
        !(name === "open" && node.tagName === "DETAILS") && !(name === "checked") && !(name === "hidden")
        && !(name === "selected" && !node.closest("select[data-field]")) } });  // what somebody picks in a form stays
      part.querySelectorAll(".log").forEach((log, at) => { if (scrolls[at]) log.scrollTop = log.scrollHeight; });
    }
    // A button that has moved, say with its row, keeps the keyboard.
    if (held && document.activeElement?.ariaLabel !== held)
      [...document.querySelectorAll("[data-live] button")].find((one) => one.ariaLabel === held)?.focus({ preventScroll: true });
    eft.refreshed += 1;
    eft.times();
    document.dispatchEvent(new Event("eft:refreshed"));
  } catch { /* the server is away; the stream says when it is back */ } finally {
    eft.busy = false;
    if (eft.again) { eft.again = false; eft.soon(); }
  }
};
eft.soon = (after = 400) => { clearTimeout(eft.timer); eft.timer = setTimeout(eft.refresh, after); };

// -- the one stream of a page. It goes on behind the last event that was seen, whatever was between.
eft.follow = () => {
  const path = document.body.dataset.stream;
  if (!path || eft.over) return;
  const stream = eft.stream = new EventSource(`${eft.root}${path}${eft.after ? `?after=${eft.after}` : ""}`);
  const hear = (event) => {
    eft.heard = performance.now();
    if (event.lastEventId) {
      if (event.lastEventId === eft.after) return;
      eft.after = event.lastEventId;
      if (/^\d+$/.test(event.lastEventId)) eft.seen.push(Number(event.lastEventId));
    }
    eft.soon();
  };
  for (const kind of ["status", "phase", "evaluation", "samples", "checkpoint", "resumed", "notice", "run_record", "result", "error", "priority", "after", "preempted", "preempts", "change"])
    stream.addEventListener(kind, hear);
  stream.addEventListener("hello", (event) => { eft.after = event.lastEventId; });
  stream.addEventListener("end", () => { stream.close(); eft.ended = true; eft.soon(0); });
  stream.onopen = () => eft.back(true);
  stream.onerror = () => {
    if (eft.ended || eft.over || stream !== eft.stream) return;
    stream.close();
    setTimeout(async () => {
      try {
        const reply = await eft.fetch("me", { signal: AbortSignal.timeout(PATIENCE) });
        if (eft.over || stream !== eft.stream) return;
        if (reply.ok) return eft.follow();
      } catch { /* away */ }
      eft.gone();
      setTimeout(() => { if (stream === eft.stream) eft.follow(); }, 1500);
    }, 300);
  };
};

// -- a server that is away, or that hangs: then its connections stay open, and nothing but its silence tells it.
const PATIENCE = 5000;  // ms
eft.gone = () => {
  if (eft.over) return;
  eft.away = true;
  eft.tell("The server does not answer; this page continues as soon as it does.", "");
};
eft.back = (connected = false) => {
  eft.heard = performance.now();
  if (!eft.away || eft.over) return;
  eft.away = false;
  eft.tell("", "good");
  if (!connected && eft.stream && !eft.ended) { eft.stream.close(); eft.follow(); }  // its connection may be a dead one
  eft.soon(0);
};
eft.probe = async () => {
  if (document.hidden || eft.over || eft.probing || performance.now() < eft.heard + PATIENCE) return;
  eft.probing = true;
  const before = eft.heard;
  try {
    const reply = await fetch(`${eft.root}healthz`, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (!reply.ok) throw new Error(reply.status);
    eft.back();
  } catch { if (eft.heard === before) eft.gone(); } finally { eft.probing = false; }
};
setInterval(eft.probe, 2000);

// -- times
eft.words = (seconds) => {
  const whole = Math.round(Math.abs(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min` + (whole < 600 && whole % 60 ? ` ${whole % 60} s` : "");
  if (whole < 172800) return `${Math.floor(whole / 3600)} h` + (Math.floor(whole / 60) % 60 ? ` ${Math.floor(whole / 60) % 60} min` : "");
  return `${Math.floor(whole / 86400)} d`;
};
const clock = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
const zone = new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" });
const zoned = (when) => `${clock.format(when)} ${zone.formatToParts(when).find((part) => part.type === "timeZoneName").value}`;
eft.times = (within = document) => {
  for (const node of within.querySelectorAll("time[datetime]")) {
    const when = new Date(node.dateTime), seconds = (Date.now() - when) / 1000;
    const text = "clock" in node.dataset ? zoned(when) : Math.abs(seconds) < 5 ? "now" : seconds > 0 ? `${eft.words(seconds)} ago` : `in ${eft.words(seconds)}`;
    if (node.textContent !== text) node.textContent = text;
    if (!("clock" in node.dataset)) node.title = zoned(when);
  }
};

// -- tables. `eft.rows` has the rows of a long one, of which only those near the window are in the page (jobs.js).
const rowsOf = (table) => eft.rows ? [...eft.rows.all] : [...table?.tBodies[0].rows || []];
const sortTable = (table, column, descending) => {
  const value = (row) => { const cell = row.cells[column]; return cell.dataset.sort ?? cell.textContent.trim(); };
  const rows = rowsOf(table);
  const numeric = rows.every((row) => value(row) === "" || !Number.isNaN(Number(value(row))));
  rows.sort((a, b) => {
    const x = value(a), y = value(b);
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = numeric ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
    return descending ? -order : order;
  });
  if (eft.rows) eft.rows.all.splice(0, rows.length, ...rows);
  else table.tBodies[0].append(...rows);
};
const arrange = eft.arrange = () => {
  for (const table of document.querySelectorAll("table[data-sorts]")) {
    const by = eft.sorted;
    if (by) {
      table.querySelectorAll("th button").forEach((button) => button.removeAttribute("aria-sort"));
      table.tHead.rows[0].cells[by.column].querySelector("button")?.setAttribute("aria-sort", by.descending ? "descending" : "ascending");
      sortTable(table, by.column, by.descending);
    }
  }
  for (const input of document.querySelectorAll("input[data-filters]")) {
    const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rowsOf(document.querySelector(input.dataset.filters)))
      row.hidden = !wanted.every((word) => row.textContent.toLowerCase().includes(word) || row.id.includes(word));
  }
  eft.rows?.place();
  const boxes = eft.rows ? eft.rows.all.map((row) => row.querySelector("input[name=job]")) : [...document.querySelectorAll("input[name=job]")];
  const chosen = boxes.filter((box) => box?.checked).length, button = document.getElementById("compare");
  if (button) {
    button.disabled = chosen < 2 || chosen > 20;
    document.getElementById("chosen").textContent = chosen < 2 ? "Choose two or more rows." : chosen > 20 ? "At most 20." : `${chosen} chosen.`;
  }
};
document.addEventListener("eft:refreshed", arrange);

// Browsers keep the clipboard from pages over plain HTTP, but for this machine's own.
const copied = async (text) => {
  if (navigator.clipboard) { try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed here */ } }
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
};

// -- buttons
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const head = button.closest("table[data-sorts] th");
  if (head) {
    eft.sorted = { column: head.cellIndex, descending: eft.sorted?.column === head.cellIndex && !eft.sorted.descending };
    arrange();
  } else if (button.dataset.copy !== undefined) {
    button.textContent = await copied(button.dataset.copy) ? "Copied" : "Select it, and copy it by hand";
  } else if (button.id === "signout") {
    await eft.fetch("ui/signout", { method: "POST" });
    location.href = `${eft.root}ui/signin?why=out`;
  }
});
document.addEventListener("input", (event) => { if (event.target.matches("[data-filters], input[name=job]")) arrange(); });
document.getElementById("step")?.addEventListener("change", (event) => {
  const address = new URL(location.href);
  address.searchParams.set("step", event.target.value);
  history.replaceState(null, "", address);
  eft.refresh();
});

// -- search in the log
const mark = () => {
  const pre = document.getElementById("log-lines"), word = document.getElementById("find")?.value.toLowerCase();
  if (!pre) return;
  const text = pre.textContent;
  pre.textContent = text;
  if (!word) return;
  const lower = text.toLowerCase(), parts = [];
  let from = 0, at;
  while ((at = lower.indexOf(word, from)) >= 0 && parts.length < 2000) {
    const hit = document.createElement("mark");
    hit.textContent = text.slice(at, at + word.length);
    parts.push(text.slice(from, at), hit);
    from = at + word.length;
  }
  pre.replaceChildren(...parts, text.slice(from));
  pre.querySelector("mark")?.scrollIntoView({ block: "nearest" });
};
document.getElementById("find")?.addEventListener("input", mark);
document.addEventListener("eft:refreshed", () => { if (document.getElementById("find")?.value) mark(); });

eft.times();
arrange();
document.querySelectorAll(".log").forEach((log) => { log.scrollTop = log.scrollHeight; });
setInterval(eft.times, 10000);
if (document.body.dataset.every) setInterval(() => { if (!document.hidden) eft.refresh(); }, 1000 * document.body.dataset.every);
document.addEventListener("visibilitychange", () => { if (!document.hidden && document.body.dataset.stream) eft.soon(0); });
eft.follow();
