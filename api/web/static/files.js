"use strict";
// Upload with progress and the faults of its rows; the first rows of a file.
(() => {
  const send = document.getElementById("send"), rows = document.getElementById("rows");
  const node = (tag, text, kind) => { const made = document.createElement(tag); made.textContent = text; if (kind) made.className = kind; return made; };
  send?.addEventListener("click", () => {
    const file = document.getElementById("choose").files[0], bar = document.getElementById("sent"), report = document.getElementById("report");
    if (!file) return report.replaceChildren(node("p", "Choose a file first.", "notice"));
    const form = new FormData(), request = new XMLHttpRequest();
    form.append("file", file, file.name);
    request.open("POST", `${eft.root}files`);
    request.setRequestHeader("x-csrf-token", eft.token);
    request.responseType = "json";
    request.upload.onprogress = (event) => { bar.hidden = false; bar.max = event.total; bar.value = event.loaded; };
    request.onerror = () => { send.disabled = false; report.replaceChildren(node("p", "The server does not answer, or ended the upload.", "notice bad")); };
    request.onload = () => {
      send.disabled = false;
      bar.hidden = true;
      if (request.status === 401) return eft.signedOut();
      const body = request.response;
      if (request.status === 201) {
        const told = node("p", `${body.filename}: ${body.rows.toLocaleString("en")} good rows, read as ${body.format}. `, "notice good"), link = node("a", "Look at it");
        link.href = `${eft.root}ui/files/${body.id}`;
        told.append(link);
        report.replaceChildren(told);
        return eft.soon(0);
      }
      const list = node("ul", "", "faults");
      for (const fault of body?.error?.faults || []) list.append(node("li", `${fault.line ? `line ${fault.line}: ` : ""}${fault.message}${fault.times > 1 ? ` (${fault.times} lines)` : ""}`));
      report.replaceChildren(node("p", body?.error?.message || `the server answered ${request.status}`, "notice bad"), list);
    };
    send.disabled = true;
    request.send(form);
  });
  if (rows && ["jsonl", "json", "csv", ""].includes(rows.dataset.container)) {
    fetch(`${eft.root}files/${rows.dataset.file}/content`, { headers: { range: "bytes=0-65535" }, credentials: "same-origin" }).then(async (reply) => {
      if (!reply.ok) throw new Error();
      const text = await reply.text(), lines = text.split("\n").filter((line) => line.trim()).slice(0, 10);
      rows.textContent = lines.map((line) => line.length > 2000 ? `${line.slice(0, 2000)} … (${line.length.toLocaleString("en")} characters)` : line).join("\n\n");
    }).catch(() => { rows.textContent = "They cannot be shown."; });
  } else if (rows) rows.textContent = `Rows of ${rows.dataset.container} are not shown here; eft files preview shows them as a job reads them.`;
})();
