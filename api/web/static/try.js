"use strict";
// Each model is asked by itself, and its answer is shown as it comes.
(() => {
  const value = (id) => document.getElementById(id).value;
  const halt = document.getElementById("halt");
  let stop = null;

  const ask = async (card, signal) => {
    const model = card.querySelector("input").value.trim();
    const [answer, state] = [card.querySelector("pre"), card.querySelector(".state")];
    const tell = (text, bad = false) => { state.textContent = text; state.classList.toggle("away", bad); };
    answer.textContent = "";
    tell(model ? "waits for an answer …" : "");
    if (!model) return;
    // What waits long waits for a slot: the queue says why.
    const look = setInterval(async () => {
      try {
        const reply = await eft.fetch("queue", { signal }), waiting = reply.ok && (await reply.json()).data.find((one) => one.job?.startsWith("serving-"));
        if (waiting && state.textContent.startsWith("waits")) tell(`waits for a slot: ${waiting.reason}`);
      } catch { /* the request itself tells what is the matter */ }
    }, 4000);
    const plain = document.getElementById("plain").checked;
    const system = value("system").trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: value("message") }];
    const body = { model, stream: true, stream_options: { include_usage: true }, temperature: Number(value("temperature")),
      seed: Number(value("seed")), max_tokens: Number(value("tokens")), ...(plain ? { prompt: (system ? `${system}\n` : "") + value("message") } : { messages }) };
    const began = performance.now();
    try {
      const reply = await eft.fetch(plain ? "v1/completions" : "v1/chat/completions",
        { method: "POST", body: JSON.stringify(body), signal, headers: { "content-type": "application/json" } });
      if (!reply.ok) { tell(await eft.fault(reply), true); return; }
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
          if (part.error) { tell(part.error.message, true); return; }
          const choice = part.choices[0];
          if (choice) { answer.textContent += (plain ? choice.text : choice.delta.content) || ""; reason = choice.finish_reason || reason; }
          if (part.usage) {
            const seconds = (performance.now() - began) / 1000;
            tell(`${part.usage.completion_tokens} tokens in ${seconds.toFixed(1)} s${reason === "length" ? ", cut off" : ""}`);
          } else if (answer.textContent) tell("…");
        }
      }
    } catch (error) { tell(error.name === "AbortError" ? "stopped" : "the server is away: ask again", error.name !== "AbortError"); } finally { clearInterval(look); }
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
