"use strict";
// Curves of one job or of several. The server thins them out so that no extreme is lost (GET /jobs/{id}/metrics?points=).
(() => {
  const box = document.getElementById("plots");
  if (!box) return;
  const EVERY = 3000;
  const jobs = JSON.parse(box.dataset.jobs);
  const POINTS = Math.round(Math.max(500, Math.min(1500, 10000 / jobs.length)));  // a chart draws those of all jobs in each frame
  const main = [
    ["loss", ["loss", "eval_loss"]], ["learning rate", ["learning_rate"]], ["gradient norm", ["grad_norm"]],
    ["tokens per second", ["tokens_per_second"]], ["memory, bytes", ["memory_bytes"]],
  ];
  const FIRST = ["loss", "eval_loss", "reward"];
  // Shown where a job has them: jobs on GPUs, stages with rewards, and stages over pairs.
  const rewards = [
    ["GPU load, %", ["gpu_busy_percent"]],
    ["reward", ["reward", "reward_std"]], ["groups without variance", ["frac_reward_zero_std"]],
    ["answer length", ["completions/mean_length", "completions/max_length"]], ["answers cut", ["completions/truncated"]],
    ["KL to the reference", ["kl"]], ["entropy", ["entropy"]], ["clipped", ["clip_ratio"]], ["sampler against trainer", ["sampler_mismatch_kl"]],
    ["rewards of pairs", ["rewards/chosen", "rewards/rejected"]], ["margin", ["rewards/margins"]], ["accuracy", ["rewards/accuracies"]],
  ];
  const data = new Map();    // job → metric → [[step, value], …]
  let loaded = false;        // whether all of them have been told once
  const charts = new Map();  // title → chart (chart.js)
  const $ = (id) => document.getElementById(id);
  const options = { smooth: 0, axis: "step", log: false, logX: false, more: "" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (at) => at < 4 ? css(`--p${at}`) : `hsl(${(at * 137.5) % 360} ${dark.matches ? "70% 70%" : "65% 38%"})`;

  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    if (size !== 0 && size < 1e-3) return value.toExponential(1);
    return String(+value.toPrecision(4));
  };

  // Exponential moving average whose beginning is not pulled to zero.
  const smoothed = (values, weight) => {
    if (!weight) return values;
    let mean = 0, sum = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = mean * weight + value * (1 - weight);
      sum = sum * weight + (1 - weight);
      return mean / sum;
    });
  };

  // What stands on the x axis for a step: between two known points in proportion.
  const places = (job) => {
    const known = options.axis === "tokens" ? data.get(job)?.total_tokens : options.axis === "time" ? data.get(job)?.seconds : null;
    if (options.axis === "step" || !known?.length) return (step) => step;
    let at = 0;
    return (step) => {
      if (known[at][0] > step) at = 0;
      while (at + 1 < known.length && known[at + 1][0] <= step) at += 1;
      const [x0, y0] = known[at], next = known[at + 1];
      if (step <= x0) return at === 0 && step < x0 ? 0 : y0;
      return next ? y0 + (next[1] - y0) * (step - x0) / (next[0] - x0) : y0;
    };
  };

  // The step that stands at a place of the x axis: the last known one before it, or the first known one behind it.
  const stepAt = (job, x, behind) => {
    const known = options.axis === "tokens" ? data.get(job)?.total_tokens : options.axis === "time" ? data.get(job)?.seconds : null;
    if (options.axis === "step" || !known?.length) return behind ? Math.ceil(x) : Math.max(0, Math.floor(x));
    const at = known.findIndex(([, y]) => y > x);
    return at < 0 ? known[known.length - 1][0] : behind ? known[at][0] : at ? known[at - 1][0] : 0;
  };
  // Points of a metric: those of the whole curve, and in a part that is looked at closely those that were asked for it.
  const points = (job, name, close) => {
    const all = data.get(job)?.[name] || [], part = close?.get(job)?.[name];
    if (!part?.length) return all;
    return [...all.filter(([step]) => step < part[0][0]), ...part, ...all.filter(([step]) => step > part[part.length - 1][0])];
  };
  // Steps that were done without this value: the trainer tells no number that is not finite. In curves that are thinned
  // out, only the newest step can be told to be one.
  const ALWAYS = ["loss", "grad_norm"];
  const broken = (job, name) => {
    const done = data.get(job)?.learning_rate || [], known = data.get(job)?.[name] || [];
    if (!ALWAYS.includes(name) || !done.length) return [];
    if (Math.max(done.length, known.length) >= POINTS - 2) return known.at(-1)?.[0] >= done.at(-1)[0] ? [] : [done.at(-1)[0]];
    const there = new Set(known.map(([step]) => step));
    return done.map(([step]) => step).filter((step) => !there.has(step));
  };
  const gaps = (names) => jobs.flatMap((job) => names.map((name) => [job, name, broken(job.id, name)])).filter(([, , steps]) => steps.length)
    .map(([job, name, steps]) => `${jobs.length > 1 ? `${job.name}: ` : ""}no finite ${name} ${steps.length > 1 ? `in ${steps.length} steps, ${steps[0]} to ${steps[steps.length - 1]}` : `at step ${steps[0]}`}`);
  const lines = (names, close) => {
    const found = [];
    jobs.forEach((job, j) => names.forEach((name, n) => {
      let known = points(job.id, name, close);
      if (!known.length) return;
      const without = broken(job.id, name);
      if (without.length) known = [...known, ...without.map((step) => [step, null])].sort(([a], [b]) => a - b);
      const place = places(job.id), at = jobs.length > 1 ? j : n, few = known.length <= 60 && n > 0;
      if (options.logX) known = known.filter(([step]) => place(step) > 0);
      if (!known.length) return;
      const ys = known.map(([, value]) => options.log && value <= 0 ? null : value);
      found.push({ label: jobs.length > 1 ? `${job.name}${n ? ` ${name}` : ""}` : name, colour: colour(at), dash: jobs.length > 1 && n ? [5, 4] : [], few,
        xs: known.map(([step]) => place(step)), ys, smooth: options.smooth && !few ? smoothed(ys, options.smooth) : null });
    }));
    return found;
  };

  const look = {
    x: (x) => options.axis === "time" ? eft.words(x) : options.axis === "tokens" ? `${short(x)} tokens` : `step ${Math.round(x).toLocaleString("en")}`,
    y: (y) => short(y),
    tick: (x) => options.axis === "time" ? eft.words(x) : short(x),
    css,
    get log() { return options.log; },
    get logX() { return options.logX; },
    get axis() { return options.axis; },
  };
  const swatch = (of) => { const made = document.createElement("i"); made.style.background = of; return made; };
  const draw = (title, names) => {
    const id = `plot-${title.replace(/[^a-z0-9]+/gi, "-")}`;
    let plot = $(id);
    if (!plot) {
      plot = document.createElement("div");
      plot.className = "plot";
      plot.id = id;
      const top = document.createElement("div"), head = document.createElement("h3"), last = document.createElement("span"), area = document.createElement("div");
      top.className = "top"; last.className = "end"; area.className = "area";
      head.textContent = title;
      top.append(head, last);
      plot.append(top, area);
      if (title === "reward") box.prepend(plot); else box.append(plot);  // where there are rewards, the loss says little
    }
    const area = plot.lastElementChild;
    if (!charts.has(title)) charts.set(title, eft.chart(area, title, look, (min, max) => closer(title, names, min, max)));
    const chart = charts.get(title), found = lines(names, chart.close);
    const bad = gaps(names), end = plot.querySelector(".end");
    const told = jobs.length > 1 ? names.length > 1 ? [`${names[1]} dashed`] : [] : found.flatMap((line) => {
      const known = line.ys.filter((value) => value !== null);
      if (!known.length) return [];
      if (found.length === 1) return [short(known[known.length - 1])];
      const one = document.createElement("span");
      one.append(swatch(line.colour), `${line.label} ${short(known[known.length - 1])}`);
      return [one];
    });
    end.replaceChildren(...[...told, ...bad.slice(0, 3), ...bad.length > 3 ? [`and ${bad.length - 3} more`] : []].flatMap((one, at) => at ? [" · ", one] : [one]));
    end.title = bad.join("\n");
    end.classList.toggle("broken", bad.length > 0);
    plot.classList.toggle("without", !found.length);
    area.className = found.length ? "area" : "empty";
    if (!found.length) { chart.end(); chart.shape = ""; area.textContent = bad.length ? "No finite value" : "No values yet"; return; }
    const shape = JSON.stringify([found.map((line) => line.label), options.axis, options.log, options.logX, !!options.smooth, dark.matches]);
    chart.set(found, chart.shape !== shape);
    chart.shape = shape;
  };
  // A part that is looked at has points of its own where the whole curve was thinned out.
  const closer = async (title, names, min, max) => {
    const chart = charts.get(title), thinned = jobs.filter((job) => names.some((name) => (data.get(job.id)?.[name] || []).length >= POINTS - 2));
    if (min === undefined || !thinned.length) {
      if (chart?.close) { chart.close = null; chart.part = ""; draw(title, names); }
      return;
    }
    const part = `${options.axis} ${min} ${max}`, found = new Map();
    if (chart.part === part && chart.close) return;
    chart.part = part;
    try {
      await Promise.all(thinned.map(async (job) => {
        const steps = `first_step=${stepAt(job.id, min, false)}&last_step=${stepAt(job.id, max, true)}`;
        const reply = await eft.fetch(`jobs/${job.id}/metrics?names=${encodeURIComponent(names.join(","))}&points=${POINTS}&${steps}`);
        if (reply.ok) found.set(job.id, await reply.json());
      }));
    } catch { return; /* the server is away: the points of the whole curve stay */ }
    if (chart.part !== part || charts.get(title) !== chart) return;
    chart.close = found;
    draw(title, names);
  };

  const names = () => [...new Set([...data.values()].flatMap((one) => Object.keys(one)))].sort();
  const drawAll = (told) => {
    const there = new Set(names()), over = ended() && loaded, none = loaded && !there.size, has = ([, list]) => list.some((name) => there.has(name));
    const wanted = [...main.filter((one) => !over && !none || has(one)), ...rewards.filter(has)];
    const words = options.more.toLowerCase().split(/[\s,]+/).filter(Boolean);
    const known = new Set(wanted.flatMap(([, list]) => list));
    for (const name of names()) if (!known.has(name) && words.some((word) => name.includes(word))) wanted.push([name, [name]]);
    const shown = new Set(wanted.map(([title]) => title));
    for (const [title, chart] of charts) if (!shown.has(title)) { chart.end(); charts.delete(title); $(`plot-${title.replace(/[^a-z0-9]+/gi, "-")}`)?.remove(); }
    box.classList.toggle("nothing", none);
    box.dataset.nothing = over ? "It ended before it had reported a value." : "No values yet: the first step brings them.";
    for (const title of due.keys()) if (!shown.has(title)) due.delete(title);  // the parts behind the charts too: they come last again
    for (const [title, list] of wanted) if (!due.has(title)) due.set(title, () => { draw(title, list); if (data.size) eft.shownAt ||= performance.now(); });
    due.set(" beside", beside).set(" offer", () => offer(known));
    if (told) after.push(told);
    if (!drawing) { drawing = true; step(); }
  };
  // A chart a frame, so that many of them hold up no gesture; a page that nobody sees has no frames.
  const due = new Map(), after = [];
  let drawing = false;
  const step = () => {
    const [next] = due;
    if (!next) { drawing = false; after.splice(0).forEach((told) => told()); return; }
    due.delete(next[0]);
    if (document.hidden) setTimeout(step); else requestAnimationFrame(step);
    next[1]();
  };
  const offer = (known) => {
    const offered = names().filter((name) => !known.has(name) && name !== "seconds");
    if ($("names") && $("names").childElementCount !== offered.length)
      $("names").replaceChildren(...offered.map((name) => { const one = document.createElement("option"); one.value = name; return one; }));
  };

  // Several jobs: which line is whose, at once.
  const legend = () => $("legend")?.replaceChildren(...jobs.map((job, at) => {
    const one = document.createElement("li");
    one.append(swatch(colour(at)), job.name);
    return one;
  }));
  legend();

  // And the figures of every metric. The thinned curves have last, smallest and largest.
  const beside = () => {
    const table = $("figures");
    if (!table) return;
    const cell = (row, text, tag = "td") => { const made = document.createElement(tag); made.textContent = text; if (text !== row.dataset.name) made.className = "n"; row.append(made); return made; };
    table.replaceChildren();
    const head = table.createTHead().insertRow();
    head.dataset.name = "Metric";
    cell(head, "Metric", "th");
    jobs.forEach((job) => cell(head, job.name, "th").classList.add("name"));
    const body = table.createTBody();
    for (const name of names()) {
      if (name === "seconds") continue;
      const row = body.insertRow();
      row.dataset.name = name;
      cell(row, name);
      jobs.forEach((job) => {
        const values = (data.get(job.id)?.[name] || []).map(([, value]) => value);
        const made = cell(row, values.length ? short(values[values.length - 1]) : "–");
        if (values.length > 1) {
          const range = document.createElement("div");
          range.className = "dim small";
          range.textContent = `${short(Math.min(...values))} to ${short(Math.max(...values))}`;
          made.append(range);
        }
      });
    }
  };

  // Drawn as they come, four times a second at most: a curve that is long does not keep the others waiting.
  let timer = 0;
  const soon = () => { timer ||= setTimeout(() => { timer = 0; drawAll(); }, eft.shownAt ? 250 : 0); };
  const ask = (query) => Promise.all(jobs.map(async (job) => {
    const reply = await eft.fetch(`jobs/${job.id}/metrics?points=${POINTS}${query}`);
    if (reply.ok) { data.set(job.id, await reply.json()); if (!eft.drawn) soon(); }
  }));
  const load = async () => {
    if (!eft.drawn) await ask(`&names=${FIRST.join(",")}`);  // whether it learns, before all the rest
    await ask("&clock=true");
    loaded = true;
    clearTimeout(timer);
    timer = 0;
    drawAll(() => { eft.drawn = (eft.drawn || 0) + 1; eft.drawnAt ||= performance.now(); });
  };

  const ended = () => $("top")?.dataset.final === "true";
  let asking = false, wanted = false, rest = 0, told = 0;
  const again = async () => {
    if (eft.over) return;
    if (asking) { wanted = true; return; }  // what is asked for now may be older than the end of the job
    asking = true;
    const began = performance.now();
    try { await load(); } catch { /* the server is away; the stream says when it is back */ } finally { asking = false; }
    rest = 10 * (performance.now() - began);
    if (wanted) { wanted = false; again(); }
  };
  for (const [id, kind] of [["smooth", "smooth"], ["axis", "axis"], ["log", "log"], ["log-x", "logX"], ["more", "more"]])
    $(id)?.addEventListener("input", (event) => {
      options[kind] = kind.startsWith("log") ? event.target.checked : kind === "smooth" ? Number(event.target.value) : event.target.value;
      if (kind === "smooth") $("smoothed").textContent = options.smooth;
      drawAll();
    });
  dark.addEventListener("change", () => { legend(); drawAll(); });
  new ResizeObserver(() => charts.forEach((chart) => chart.fit())).observe(box);
  let last = ended();
  // Curves that take the server long are asked for less often: ten times as long as they took passes between two askings.
  setInterval(() => {
    if (document.hidden || ended() || performance.now() < told + rest) return;
    told = performance.now();
    again();
    eft.soon(0);
  }, EVERY);
  document.addEventListener("eft:refreshed", () => { if (ended() && !last) { last = true; again(); } else if (!ended()) { last = false; } });
  again();
  eft.charts = charts;
})();
