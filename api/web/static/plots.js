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
    ["tokens per second", ["tokens_per_second"]], ["memory", ["memory_bytes"]],
  ];
  // Shown where a job has them: jobs on GPUs, stages with rewards, and stages over pairs.
  const rewards = [
    ["GPU load, %", ["gpu_busy_percent"]],
    ["reward", ["reward", "reward_std"]], ["groups without variance", ["frac_reward_zero_std"]],
    ["answer length", ["completions/mean_length", "completions/max_length"]], ["answers cut", ["completions/truncated"]],
    ["KL to the reference", ["kl"]], ["entropy", ["entropy"]], ["clipped", ["clip_ratio"]], ["sampler against trainer", ["sampler_mismatch_kl"]],
    ["rewards of pairs", ["rewards/chosen", "rewards/rejected"]], ["margin", ["rewards/margins"]], ["accuracy", ["rewards/accuracies"]],
  ];
  const data = new Map();    // job → metric → [[step, value], …]
  const charts = new Map();  // title → uPlot
  const $ = (id) => document.getElementById(id);
  const options = { smooth: 0, axis: "step", log: false, more: "" };
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

  const lines = (names) => {
    const found = [];
    jobs.forEach((job, j) => names.forEach((name, n) => {
      const points = data.get(job.id)?.[name];
      if (!points?.length) return;
      const place = places(job.id);
      const at = jobs.length > 1 ? j : n;
      found.push({ label: jobs.length > 1 ? `${job.name}${n ? ` ${name}` : ""}` : name, colour: colour(at), dash: jobs.length > 1 && n ? [5, 4] : [],
        few: points.length <= 60 && n > 0,
        xs: points.map(([step]) => place(step)), ys: points.map(([, value]) => options.log && value <= 0 ? null : value) });
    }));
    return found;
  };

  const joined = (found) => {
    const tables = [];
    for (const line of found) {
      tables.push([line.xs, line.ys]);
      if (options.smooth && !line.few) tables.push([line.xs, smoothed(line.ys, options.smooth)]);
    }
    return tables.length ? uPlot.join(tables) : null;
  };

  const tip = () => {
    const node = document.createElement("div");
    node.className = "u-tip";
    node.hidden = true;
    return { hooks: {
      init: (u) => u.over.append(node),
      setCursor: (u) => {
        const { left, top, idx } = u.cursor;
        if (idx === null || idx === undefined || left < 0) { node.hidden = true; return; }
        let best = null;
        for (let s = 1; s < u.series.length; s += 1) {
          if (!u.series[s].show) continue;
          // The nearest point that this line has: lines of several jobs have their own steps.
          for (let reach = 0; reach < 40; reach += 1) {
            const at = u.data[s][idx - reach] != null ? idx - reach : u.data[s][idx + reach] != null ? idx + reach : -1;
            if (at < 0) continue;
            const away = Math.abs(u.valToPos(u.data[s][at], "y") - top) + Math.abs(u.valToPos(u.data[0][at], "x") - left) / 4;
            if (!best || away < best.away) best = { away, s, at };
            break;
          }
        }
        if (!best) { node.hidden = true; return; }
        node.textContent = `${u.series[best.s].label}  ${short(u.data[best.s][best.at])}  at ${reads(u.data[0][best.at])}`;
        node.hidden = false;
        const width = node.offsetWidth;
        node.style.left = `${Math.max(0, Math.min(left + 12, u.over.clientWidth - width))}px`;
        node.style.top = `${top > 40 ? top - 34 : top + 14}px`;
      },
    } };
  };
  const reads = (x) => options.axis === "time" ? eft.words(x) : options.axis === "tokens" ? `${short(x)} tokens` : `step ${Math.round(x).toLocaleString("en")}`;

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
      box.append(plot);
    }
    const area = plot.lastElementChild, found = lines(names), table = joined(found);
    plot.querySelector(".end").textContent = jobs.length > 1 ? "" : found.map((line) => {
      const known = line.ys.filter((value) => value !== null);
      return known.length ? `${found.length > 1 ? `${line.label} ` : ""}${short(known[known.length - 1])}` : "";
    }).join(" · ");
    plot.classList.toggle("without", !table);
    const shape = JSON.stringify([found.map((line) => line.label), options.axis, options.log, !!options.smooth, dark.matches]);
    const before = charts.get(title);
    if (!table) {
      before?.u.destroy();
      charts.delete(title);
      area.className = "empty";
      area.textContent = "No values yet";
      return;
    }
    if (before && before.shape === shape) {
      const { min, max } = before.u.scales.x, all = before.u.data[0];
      const zoomed = min > all[0] || max < all[all.length - 1];
      before.u.setData(table, !zoomed);
      return;
    }
    before?.u.destroy();
    area.className = "area";
    area.textContent = "";
    const grid = { stroke: css("--line"), width: 1 }, stroke = css("--dim"), font = "11px system-ui, sans-serif";
    const series = [{ label: options.axis }];
    for (const line of found) {
      const smooth = options.smooth && !line.few;
      series.push({ label: line.label, stroke: line.colour, width: smooth ? 1 : 1.5, alpha: smooth ? 0.28 : 1, dash: line.dash, spanGaps: true, points: { show: line.few, size: 5 } });
      if (smooth) series.push({ label: line.label, stroke: line.colour, width: 2, dash: line.dash, spanGaps: true, points: { show: false } });
    }
    const u = new uPlot({
      width: area.clientWidth, height: 190, series, plugins: [tip()], legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: options.log ? { distr: 3 } : {} },
      axes: [
        { stroke, grid, font, ticks: grid, size: 30, values: (_, ticks) => ticks.map((tick) => options.axis === "time" ? eft.words(tick) : short(tick)), space: 60 },
        { stroke, grid, font, ticks: grid, size: 52, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : short(tick)) },
      ],
    }, table, area);
    charts.set(title, { u, shape });
  };

  const names = () => [...new Set([...data.values()].flatMap((one) => Object.keys(one)))].sort();
  const drawAll = () => {
    const there = new Set(names()), wanted = [...main, ...rewards.filter(([, list]) => list.some((name) => there.has(name)))];
    const words = options.more.toLowerCase().split(/[\s,]+/).filter(Boolean);
    const known = new Set(wanted.flatMap(([, list]) => list));
    for (const name of names()) if (!known.has(name) && words.some((word) => name.includes(word))) wanted.push([name, [name]]);
    const shown = new Set(wanted.map(([title]) => title));
    for (const [title, chart] of charts) if (!shown.has(title)) { chart.u.destroy(); charts.delete(title); $(`plot-${title.replace(/[^a-z0-9]+/gi, "-")}`)?.remove(); }
    wanted.forEach(([title, list]) => draw(title, list));
    beside();
    const offered = names().filter((name) => !known.has(name) && name !== "seconds");
    if ($("names") && $("names").childElementCount !== offered.length)
      $("names").replaceChildren(...offered.map((name) => { const one = document.createElement("option"); one.value = name; return one; }));
  };

  // Several jobs: which line is whose, and the figures of every metric. The thinned curves have last, smallest and largest.
  const beside = () => {
    if ($("legend") && !$("legend").childElementCount) jobs.forEach((job, at) => {
      const one = document.createElement("li"), line = document.createElement("i");
      line.style.background = colour(at);
      one.append(line, job.name);
      $("legend").append(one);
    });
    const table = $("figures");
    if (!table) return;
    const cell = (row, text, tag = "td") => { const made = document.createElement(tag); made.textContent = text; if (text !== row.dataset.name) made.className = "n"; row.append(made); return made; };
    table.replaceChildren();
    const head = table.createTHead().insertRow();
    head.dataset.name = "Metric";
    cell(head, "Metric", "th");
    jobs.forEach((job) => cell(head, job.name, "th"));
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

  const load = async () => {
    await Promise.all(jobs.map(async (job) => {
      const reply = await eft.fetch(`jobs/${job.id}/metrics?points=${POINTS}&clock=true`);
      if (reply.ok) data.set(job.id, await reply.json());
    }));
    drawAll();
    eft.drawn = (eft.drawn || 0) + 1;
    eft.drawnAt ||= performance.now();
  };

  const ended = () => $("top")?.dataset.final === "true";
  let asking = false, wanted = false;
  const again = async () => {
    if (eft.over) return;
    if (asking) { wanted = true; return; }  // what is asked for now may be older than the end of the job
    asking = true;
    try { await load(); } catch { /* the server is away; the stream says when it is back */ } finally { asking = false; }
    if (wanted) { wanted = false; again(); }
  };
  for (const [id, kind] of [["smooth", "smooth"], ["axis", "axis"], ["log", "log"], ["more", "more"]])
    $(id)?.addEventListener("input", (event) => {
      options[kind] = kind === "log" ? event.target.checked : kind === "smooth" ? Number(event.target.value) : event.target.value;
      if (kind === "smooth") $("smoothed").textContent = options.smooth;
      drawAll();
    });
  dark.addEventListener("change", drawAll);
  new ResizeObserver(() => charts.forEach(({ u }) => { const width = u.root.parentElement.clientWidth; if (Math.abs(width - u.width) > 1) u.setSize({ width, height: 190 }); })).observe(box);
  let last = ended();
  setInterval(() => { if (!document.hidden && !ended() && box.dataset.still === undefined) { again(); eft.soon(0); } }, EVERY);
  document.addEventListener("eft:refreshed", () => { if (ended() && !last) { last = true; again(); } else if (!ended()) { last = false; } });
  again();
  eft.charts = charts;
})();
