"use strict";
// The tokens of an answer, coloured by what is known of each.
(() => {
  const node = (tag, text, kind) => { const made = document.createElement(tag); made.textContent = text; if (kind) made.className = kind; return made; };
  const apart = (one, two) => one && two ? one.map((value, at) => value - two[at]) : null;
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  // What a colour may stand for: blue above zero, red below.
  const views = ({ sampler, trainer, reference, value, advantage }, flat) => [
    ["log-probability at the draw", sampler],
    ["log-probability in training", trainer],
    ["training less draw", apart(trainer, sampler)],
    ["training less reference", apart(trainer, reference)],
    ["advantage", advantage || sampler.map(() => flat)],
    ["value of the critic", value],
  ].filter(([, values]) => values?.length);
  const paint = (spans, values) => {
    const most = Math.max(...values.map(Math.abs)) || 1;
    values.forEach((value, at) => { spans[at].style.background = `color-mix(in srgb, var(${value < 0 ? "--failed" : "--running"}) ${Math.round(45 * Math.abs(value) / most)}%, transparent)`; });
  };
  const show = (box, { detail, tokens }) => {
    if (!detail) { box.replaceChildren(node("p", "The tokens of this answer were not kept.", "dim small")); return; }
    const choices = views(detail, Number(box.dataset.advantage)), choose = document.createElement("select"), line = node("div", "", "answer"), told = node("p", "", "dim small");
    choose.setAttribute("aria-label", "Colour of the tokens");
    choose.append(...choices.map(([name], at) => { const one = node("option", name); one.value = at; return one; }));
    const spans = detail.words.map((word, at) => {
      const span = node("span", word.replaceAll("\n", "\u21b5\n") || "\u2205");
      span.title = choices.map(([name, values]) => `${name} ${values[at].toPrecision(4)}`).join("\n");
      return span;
    });
    line.append(...spans);
    line.tabIndex = 0;
    const look = () => {
      const [, values] = choices[choose.value];
      paint(spans, values);
      told.textContent = `${tokens} tokens, mean ${mean(values).toPrecision(4)}, from ${Math.min(...values).toPrecision(4)} to ${Math.max(...values).toPrecision(4)}. Blue is above zero, red below; each token's numbers show under the pointer.`;
    };
    choose.addEventListener("change", look);
    box.replaceChildren(choose, line, told);
    if (spans.length) look();
  };
  document.addEventListener("click", async (event) => {
    const box = event.target.closest("button") && event.target.closest("[data-tokens]");
    if (!box) return;
    event.target.disabled = true;
    try {
      const reply = await eft.fetch(box.dataset.tokens);
      if (!reply.ok) throw new Error(await eft.fault(reply));
      show(box, (await reply.json()).data[0]);
    } catch (error) { event.target.disabled = false; if (!eft.over) eft.tell(error.message); }
  });
})();
