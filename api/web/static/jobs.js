"use strict";
// The list of jobs: older ones come while one scrolls, and of all that came only those near the window are in the page.
// A chunk is one body of the table. Where it is far from the window, one row of its height stands for it.
(() => {
  const table = document.getElementById("jobs"), status = document.getElementById("loaded"), end = document.getElementById("more-jobs");
  if (!table) return;
  let next = table.dataset.more, asking = false;
  const all = [...table.tBodies[0].rows], CHUNK = 50, NEAR = "1500px";
  const chunks = [];
  const watch = new IntersectionObserver((seen) => {
    const changed = [];
    for (const one of seen) {
      const chunk = chunks.find((each) => each.body === one.target);
      if (chunk && chunk.near !== one.isIntersecting) { chunk.near = one.isIntersecting; changed.push([chunk, one.boundingClientRect.height]); }
    }
    for (const [chunk, height] of changed) show(chunk, height);
  }, { rootMargin: `${NEAR} 0px` });
  const show = (chunk, height) => {
    if (chunk.near) { chunk.body.replaceChildren(...chunk.rows); eft.times(chunk.body); return; }
    const row = document.createElement("tr"), cell = document.createElement("td");
    cell.colSpan = table.tHead.rows[0].cells.length;
    cell.height = Math.round(height);
    cell.className = "gap";
    row.append(cell);
    chunk.body.replaceChildren(row);
  };
  const place = () => {
    const shown = all.filter((row) => !row.hidden), first = chunks.length === 0;
    const wanted = Math.max(1, Math.ceil(shown.length / CHUNK));
    while (chunks.length > wanted) { const gone = chunks.pop(); watch.unobserve(gone.body); gone.body.remove(); }
    while (chunks.length < wanted) {
      const body = first && chunks.length === 0 ? table.tBodies[0] : table.createTBody();
      chunks.push({ body, rows: [], near: true });
      watch.observe(body);
    }
    chunks.forEach((chunk, at) => {
      const rows = shown.slice(at * CHUNK, (at + 1) * CHUNK), same = rows.length === chunk.rows.length && rows.every((row, n) => row === chunk.rows[n]);
      chunk.rows = rows;
      if (!same && chunk.near) show(chunk);
    });
    status.textContent = `${all.length.toLocaleString("en")} jobs${next ? " so far" : ""}${shown.length < all.length ? `, ${shown.length.toLocaleString("en")} shown` : ""}`;
  };
  eft.rows = { all, place };  // page.js sorts and filters these
  const load = async () => {
    if (!next || asking || eft.over) return;
    asking = true;
    try {
      const address = new URL(location.href);
      address.searchParams.set("after", next);
      const reply = await fetch(address, { credentials: "same-origin", redirect: "manual" });
      if (reply.type === "opaqueredirect") return eft.signedOut();
      if (!reply.ok) { status.textContent = `Older jobs cannot be loaded: the server answered ${reply.status}.`; next = ""; return; }
      const fresh = new DOMParser().parseFromString(await reply.text(), "text/html").getElementById("jobs");
      const known = new Set(all.map((row) => row.id));
      next = fresh?.dataset.more || "";
      for (const row of [...fresh?.tBodies[0].rows || []]) if (!known.has(row.id)) all.push(document.adoptNode(row));
      eft.arrange();
    } catch { /* the server is away; the next scroll asks again */ } finally { asking = false; }
    if (next && end.getBoundingClientRect().top < innerHeight + 1500) load();
  };
  new IntersectionObserver((seen) => { if (seen.some((one) => one.isIntersecting)) load(); }, { rootMargin: NEAR }).observe(end);
  // What the server says now of the newest jobs: rows that are known are changed in place, new ones come first.
  eft.liveParts.list = (part, fresh) => {
    const told = [...(fresh.querySelector("#jobs")?.tBodies[0].rows || [])], known = new Map(all.map((row) => [row.id, row])), ids = new Set(told.map((row) => row.id));
    const last = fresh.querySelector("#jobs")?.dataset.more ? told[told.length - 1].id : "";
    const kept = all.filter((row) => ids.has(row.id) || (last && row.id < last));  // behind the first page nothing is known
    const rows = told.map((row) => {
      const old = known.get(row.id);
      if (!old) return document.adoptNode(row);
      Idiomorph.morph(old, row, { ignoreActiveValue: eft.typing(), callbacks: { beforeAttributeUpdated: (name) => name !== "checked" && name !== "hidden" } });
      return old;
    });
    const first = new Set(rows);
    all.splice(0, all.length, ...rows, ...kept.filter((row) => !first.has(row)));
  };
  // Rows that are far from the window are not in the page, so that the form would not send their boxes.
  table.closest("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const chosen = all.map((row) => row.querySelector("input[name=job]")).filter((box) => box?.checked).map((box) => `job=${box.value}`);
    location.href = `${eft.root}ui/compare?${chosen.join("&")}`;
  });
  eft.arrange();
})();
