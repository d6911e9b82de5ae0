"use strict";
// Forms, lists and buttons that state a request of the API in their attributes: `data-method`, `data-sends` (its path,
// `{name}` taken from the form's field of this name) and `data-body`, or the form's fields: `data-number` a number,
// `data-list` a list of one, `data-moment` a time with its zone. A button asks `data-asks` before and sends what is said
// as `data-field` of its body, or of the query where it has none; `data-then` is the page to go to, with the id of what
// was made where it ends in a slash.
(() => {
  const show = ({ key, name }) => {
    const box = document.getElementById("made"), shown = document.createElement("code"), copy = document.createElement("button");
    shown.textContent = copy.dataset.copy = key;
    Object.assign(copy, { type: "button", textContent: "Copy" });
    box.replaceChildren(`The key ${name}, which is shown only now: `, shown, " ", copy);
    box.hidden = false;
  };
  // The id of a known user in place of the name, which may hold a slash.
  const inPath = (name) => encodeURIComponent([...document.querySelectorAll("#known-users option")].find((one) => one.value === name)?.dataset.id ?? name);
  document.addEventListener("submit", async (event) => {
    const form = event.target.closest("form[data-sends]");
    if (!form) return;
    event.preventDefault();
    const body = {};
    for (const input of form.querySelectorAll("[name]")) {
      const value = input.type === "checkbox" ? input.checked : input.value.trim();
      if (value === "") continue;
      const chosen = form.querySelector(`[data-names="${input.name}"]`);
      body[chosen ? chosen.value : input.name] = "number" in input.dataset ? Number(value) : "list" in input.dataset ? [value]
        : "moment" in input.dataset ? new Date(value).toISOString() : value;
    }
    const path = form.dataset.sends.replace(/{(\w+)}/g, (_, name) => { const part = inPath(body[name]); delete body[name]; return part; });
    const button = form.querySelector("button");
    button.disabled = true;
    const reply = await eft.send(path, form.dataset.method, body);
    button.disabled = false;
    if (!reply) return;
    form.reset();
    const made = await reply.json();
    if (made.key) show(made);
  });
  document.addEventListener("change", async (event) => {
    const list = event.target.closest("select[data-sends]");
    if (list && !await eft.send(list.dataset.sends, list.dataset.method, { [list.dataset.field]: list.value }))
      list.value = [...list.options].find((option) => option.defaultSelected).value;
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-sends]");
    if (!button || (button.dataset.sure && !confirm(button.dataset.sure))) return;
    const { asks, field, then, method, body } = button.dataset;
    const sent = body && JSON.parse(body);
    let path = button.dataset.sends;
    if (asks) {
      const said = prompt(asks);
      if (said === null) return;
      if (sent) sent[field] = said; else path += `?${field}=${encodeURIComponent(said)}`;
    }
    const held = document.activeElement === button;
    button.disabled = true;  // which takes the keyboard away from it
    const reply = await eft.send(path, method, sent);
    button.disabled = false;
    if (held) button.focus();
    if (reply && then) location.href = eft.root + (then.endsWith("/") ? then + (await reply.json()).id : then);
  });
})();
