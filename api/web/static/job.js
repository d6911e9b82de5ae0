"use strict";
// One job: its rows as the model is trained on them, and the memory that was planned for it.
(() => {
  const plan = document.getElementById("planned"), button = document.getElementById("show-rows"), rows = document.getElementById("trained-rows");
  const node = (tag, text, kind) => { const made = document.createElement(tag); made.textContent = text; if (kind) made.className = kind; return made; };
  const size = (bytes) => bytes >= 1e9 ? `${(bytes / 1e9).toPrecision(3)} GB` : `${(bytes / 1e6).toPrecision(3)} MB`;
  const json = { "content-type": "application/json" };
  const specOf = async (id) => { const reply = await eft.fetch(`jobs/${id}`); if (!reply.ok) throw new Error(await eft.fault(reply)); return (await reply.json()).spec; };

  const compare = async () => {
    const spec = await specOf(plan.dataset.job);
    const reply = await eft.fetch("jobs?dry_run=true", { method: "POST", body: JSON.stringify({ ...spec, after: [] }), headers: json });
    if (!reply.ok) { plan.replaceChildren(node("p", `There is no plan: ${await eft.fault(reply)}.`, "dim")); return; }
    const told = await reply.json(), places = (told.plan?.places || []).filter((place) => place.peak_bytes);
    if (!places.length) { plan.replaceChildren(node("p", `There is no plan: ${told.plan_reason || "no slot here takes it"}.`, "dim")); return; }
    plan.replaceChildren(...places.map((place) => node("p", `Peak planned on ${place.slots.join(", ")}: ${size(place.peak_bytes)} of tensors`, "dim")));
  };
  if (plan) compare().catch((error) => plan.replaceChildren(node("p", error.message, "dim")));

  const sample = (one) => {
    const row = document.createElement("article"), text = node("div", "", "answer");
    row.className = "sample";
    row.append(node("h4", `row ${one.line}: ${one.tokens} tokens, ${one.label_tokens} of them learned${one.cut_from ? `, cut from ${one.cut_from}` : ""}`));
    for (const part of one.segments) { if (part.learned) text.append(node("mark", part.text)); else text.append(part.text); }
    row.append(text);
    return row;
  };
  button?.addEventListener("click", async () => {
    button.disabled = true;
    rows.replaceChildren(node("p", "Rendering the rows …", "dim"));
    try {
      const spec = await specOf(button.dataset.job), file = button.dataset.file, { train, ...data } = spec.data;
      delete spec.after;
      spec.data = { ...data, train: { format: train.format, columns: train.columns } };
      let reply = await eft.fetch(`files/${file}/preview?wait=30`, { method: "POST", body: JSON.stringify(spec), headers: json });
      let told = reply.ok ? await reply.json() : null;
      while (told && !["succeeded", "failed", "cancelled"].includes(told.status)) {
        rows.replaceChildren(node("p", `Waiting: ${told.reason}.`, "dim"));
        reply = await eft.fetch(`files/${file}/previews/${told.id}?wait=30`);
        told = reply.ok ? await reply.json() : null;
      }
      if (!told) throw new Error(await eft.fault(reply));
      if (!told.result) throw new Error(told.failure?.message || told.reason);
      const { result } = told, lead = `${result.rows.used.toLocaleString("en")} rows used, ${result.rows.truncated.toLocaleString("en")} truncated, ${result.rows.dropped.toLocaleString("en")} dropped. Marked text is learned.`;
      rows.replaceChildren(node("p", lead), ...result.samples.map(sample));
    } catch (error) {
      rows.replaceChildren(node("p", error.message, "notice bad"));
    } finally { button.disabled = false; }
  });
})();
