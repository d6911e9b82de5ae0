"use strict";
// Each model is asked by itself, and its answer is shown as it comes.
(() => {
  const value = (id) => document.getElementById(id).value;
  const halt = document.getElementById("halt");
  let stop = null;

  const ask = async (card, signal) => {
    const model = card.querySelector("input").value.trim();
    const [answer, state] = [card.querySelector("pre"), card.querySelector(".state")];
    answer.textContent = "";
    state.textContent = model ? "waits for an answer …" : "";
    if (!model) return;
    const plain = document.getElementById("plain").checked;
    const system = value("system").trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: value("message") }];
    const body = { model, stream: true, stream_options: { include_usage: true }, temperature: Number(value("temperature")),
      seed: Number(value("seed")), max_tokens: Number(value("tokens")), ...(plain ? { prompt: (system ? `${system}\n` : "") + value("message") } : { messages }) };
    const began = performance.now();
    try {
      const reply = await eft.fetch(plain ? "v1/completions" : "v1/chat/completions",
        { method: "POST", body: JSON.stringify(body), signal, headers: { "content-type": "application/json" } });
      if (!reply.ok) { state.textContent = await eft.fault(reply); return; }
      let left = "";
      let reason = "";
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value: text } = await reader.read();
        if (done) break;
        const events = (left + text).split("\n\n");
        left = events.pop();
        for (const event of events) {
          if (!event.startsWith("data: {")) continue;
          const part = JSON.parse(event.slice(6));
          if (part.error) { state.textContent = part.error.message; return; }
          const choice = part.choices[0];
          if (choice) { answer.textContent += (plain ? choice.text : choice.delta.content) || ""; reason = choice.finish_reason || reason; }
          if (part.usage) {
            const seconds = (performance.now() - began) / 1000;
            state.textContent = `${part.usage.completion_tokens} tokens in ${seconds.toFixed(1)} s${reason === "length" ? ", cut off" : ""}`;
          } else if (answer.textContent) state.textContent = "…";
        }
      }
    } catch (error) { state.textContent = error.name === "AbortError" ? "stopped" : "the server is away: ask again"; }
  };

  document.getElementById("asking").addEventListener("submit", async (event) => {
    event.preventDefault();
    stop?.abort();
    stop = new AbortController();
    if (halt) halt.hidden = false;
    await Promise.all([...document.querySelectorAll(".trial")].map((card) => ask(card, stop.signal)));
    if (halt) halt.hidden = true;
  });
  halt?.addEventListener("click", () => stop?.abort());
})();
