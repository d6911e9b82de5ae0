"use strict";
// The short form writes the job file; the file is checked and planned by a dry run, and sent as it stands.
(() => {
  const file = document.getElementById("file"), form = document.getElementById("short"), checked = document.getElementById("checked"), send = document.getElementById("submit");
  let written = file.value, number = 0, timer;
  const plain = (text) => {
    const value = text.trim();
    if (/^[{[]/.test(value) || /^(true|false|null|-?\d+(\.\d+)?([eE][-+]?\d+)?)$/.test(value)) { try { return JSON.parse(value); } catch { /* it is text */ } }
    return value;
  };
  const scalar = (value) => typeof value === "string" && /^[A-Za-z][\w./-]*$/.test(value) && !/^(true|false|null|yes|no|on|off|y|n)$/i.test(value) ? value : JSON.stringify(value);
  const dump = (value, indent = "") => Object.entries(value).map(([key, one]) =>
    one && typeof one === "object" && !Array.isArray(one) && Object.keys(one).length ? `${indent}${key}:\n${dump(one, `${indent}  `)}` : `${indent}${key}: ${scalar(one)}\n`).join("");
  const write = () => {
    const made = {};
    const put = (path, value) => {
      const keys = path.split(".");
      let at = made;
      for (const key of keys.slice(0, -1)) {
        if (typeof at[key] === "string") at[key] = { type: at[key] };
        at = at[key] = typeof at[key] === "object" && at[key] ? at[key] : {};
      }
      at[keys[keys.length - 1]] = value;
    };
    for (const input of form.querySelectorAll("[data-path]")) if (input.value.trim()) put(input.dataset.path, input.dataset.path === "name" ? input.value.trim() : plain(input.value));
    for (const row of form.querySelectorAll(".other")) {
      const [path, value] = row.querySelectorAll("input");
      if (path.value.trim() && value.value.trim()) put(path.value.trim(), plain(value.value));
    }
    file.value = written = dump(made);
    document.getElementById("by-hand").hidden = true;
    look();
  };
  const node = (tag, text, kind) => { const made = document.createElement(tag); made.textContent = text; if (kind) made.className = kind; return made; };
  const size = (bytes) => bytes >= 1e9 ? `${(bytes / 1e9).toPrecision(3)} GB` : `${(bytes / 1e6).toPrecision(3)} MB`;
  const faults = (error) => {
    const list = node("ul", "", "faults");
    for (const fault of error.faults?.length ? error.faults : [error]) {
      const one = document.createElement("li");
      if (fault.field) one.append(node("code", fault.field), " ");
      one.append(fault.message);
      list.append(one);
    }
    return list;
  };
  const planned = (reply) => {
    const parts = [], plan = reply.plan;
    if (!plan) return [node("p", `The spec is good. There is no plan of its memory: ${reply.plan_reason}.`)];
    parts.push(node("p", plan.fits === false ? `The spec is good, but it fits no slot here: ${plan.reason || ""}` : plan.fits ? "The spec is good and the job fits." : "The spec is good.", plan.fits === false ? "notice bad" : "notice good"));
    const about = [];
    if (plan.parameters) about.push(`${plan.parameters < 1e6 ? plan.parameters.toLocaleString("en") : `${(plan.parameters / 1e6).toPrecision(3)} M`} parameters`);
    if (plan.batch?.steps) about.push(`${plan.batch.steps.toLocaleString("en")} steps of ${plan.batch.per_step} rows`);
    if (plan.disk?.total_bytes) about.push(`${size(plan.disk.total_bytes)} of disk`);
    parts.push(node("p", about.join(" · "), "dim"));
    const table = document.createElement("table");
    table.className = "plain";
    const head = table.createTHead().insertRow();
    for (const [word, kind] of [["Slots", ""], ["Fits", ""], ["Peak", "n"], ["of", "n"], ["Time", ""]]) head.append(node("th", word, kind));
    const body = table.createTBody();
    for (const place of plan.places || []) {
      const row = body.insertRow();
      row.append(node("td", place.slots.join(", "), "mono"), node("td", place.fits ? "yes" : place.fits === null ? "perhaps" : "no"),
        node("td", place.peak_bytes ? size(place.peak_bytes) : "–", "n"), node("td", place.memory_bytes ? size(place.memory_bytes) : "–", "n"),
        node("td", place.time?.seconds ? `about ${eft.words(place.time.seconds)}` : "not known"));
      if (place.would_fit?.length) { const cell = body.insertRow().insertCell(); cell.colSpan = 5; cell.className = "dim"; cell.textContent = place.would_fit.map((one) => typeof one === "string" ? one : one.words || one.reason || JSON.stringify(one)).join("; "); }
    }
    parts.push(table);
    for (const notice of [...(reply.notices || []), ...(plan.notices || [])]) parts.push(node("p", notice.message || String(notice), "notice"));
    return parts;
  };
  const post = (query = "", headers = {}) => eft.fetch(`jobs${query}`, { method: "POST", body: file.value, headers: { "content-type": "application/yaml", ...headers } });
  const check = async () => {
    const mine = number += 1;
    if (!file.value.trim()) { checked.replaceChildren(node("p", "Name a model and data.", "dim")); send.disabled = true; return; }
    let reply, body;
    try { reply = await post("?dry_run=true"); body = await reply.json(); } catch { if (mine === number) checked.replaceChildren(node("p", "The server does not answer; the file is checked again when it changes.", "notice")); return; }
    if (mine !== number || eft.over) return;
    send.disabled = !reply.ok || body.plan?.fits === false;
    checked.replaceChildren(...(reply.ok ? planned(body) : [faults(body.error)]));
  };
  const look = () => { send.disabled = true; clearTimeout(timer); timer = setTimeout(check, 450); };
  form.addEventListener("input", (event) => { if (!event.target.matches("[data-filters]")) write(); });
  file.addEventListener("input", () => { document.getElementById("by-hand").hidden = file.value === written; look(); });
  document.getElementById("another").addEventListener("click", () => {
    const row = document.createElement("div");
    row.className = "other controls";
    const path = document.createElement("input"), value = document.createElement("input");
    path.setAttribute("list", "fields"); path.placeholder = "training.seed"; path.setAttribute("aria-label", "Field");
    value.placeholder = "value"; value.setAttribute("aria-label", "Value");
    row.append(path, value);
    document.getElementById("others").append(row);
    path.focus();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  const once = `page-${crypto.getRandomValues(new Uint32Array(4)).join("")}`;
  let tries = 0;
  send.addEventListener("click", async () => {
    send.disabled = true;
    let reply;
    try { reply = await post("", { "idempotency-key": `${once}-${tries}` }); } catch { send.disabled = false; return eft.tell("The server does not answer. Submit again: the job is made once."); }
    if (reply.ok) { location.href = `${eft.root}ui/jobs/${(await reply.json()).id}`; return; }
    tries += 1;
    if (!eft.over) checked.replaceChildren(faults((await reply.json()).error));
  });
  if (file.value) look(); else if (form.querySelector("[data-path='data.train']").value) write();
})();
