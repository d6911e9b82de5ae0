"use strict";
// One model: tags, exports, and its end.
(() => {
  const model = document.getElementById("top").dataset.model;
  const send = (path, method, body) => eft.send(`models/${model}${path}`, method, body);
  document.getElementById("add-tag")?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const input = document.getElementById("new-tag");
    if (await send("/tags", "POST", { add: [input.value.trim()] })) input.value = "";
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.untag) await send("/tags", "POST", { remove: [button.dataset.untag] });
    else if (button.dataset.cancelExport) await send(`/exports/${button.dataset.cancelExport}/cancel`, "POST");
    else if (button.id === "export") await send("/exports", "POST", { export: [JSON.parse(document.getElementById("format").value)] });
    else if (button.id === "delete-model" && confirm(button.dataset.sure) && await send("", "DELETE")) location.href = `${eft.root}ui/models`;
  });
})();
