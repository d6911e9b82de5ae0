"use strict";
// One chart over uPlot: lines that each have steps of their own, the nearest point under the pointer, zoom and pan.
(() => {
  const HEIGHT = 190;
  // First place in a sorted list whose value is not below `wanted`.
  const place = (sorted, wanted) => {
    let low = 0, high = sorted.length;
    while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] < wanted) low = mid + 1; else high = mid; }
    return low;
  };

  const same = (value) => value, power = (value) => 10 ** value;
  // `look`: words of an x, words of a y, a colour of the page by its name, whether y and x are logarithmic, words of the
  // x axis.
  // `zoomed` is called with the borders of a part that stays in view, and without any when all is shown.
  eft.chart = (area, title, look, zoomed) => {
    const chart = { lines: [], all: [0, 1], view: [0, 1] };
    const tip = document.createElement("div"), dot = document.createElement("i");
    tip.className = "u-tip";
    dot.className = "u-dot";
    tip.hidden = dot.hidden = true;

    // A path visits only the points in view and one beyond each border; uPlot's own would visit the steps of all lines.
    const path = (at, smooth) => (u) => {
      const line = chart.lines[at], { xs } = line, ys = smooth ? line.smooth : line.ys, { left, top, width, height } = u.bbox;
      const f = look.log ? Math.log10 : same, g = look.logX ? Math.log10 : same, { x, y } = u.scales, drawn = new Path2D();
      const from = g(x.min), across = width / (g(x.max) - from), low = f(y.min), up = height / (f(y.max) - low);
      const to = Math.min(xs.length - 1, place(xs, x.max));
      let begun = false;
      for (let i = Math.max(0, place(xs, x.min) - 1); i <= to; i += 1) {
        if (ys[i] === null) { begun = false; continue; }  // a gap: nothing was measured between its ends
        const px = left + (g(xs[i]) - from) * across, py = top + height - (f(ys[i]) - low) * up;
        const alone = !begun && (i === to || ys[i + 1] === null);
        if (begun) drawn.lineTo(px, py); else drawn.moveTo(px, py);
        begun = true;
        if (line.few || alone) { drawn.arc(px, py, 2, 0, 7); drawn.moveTo(px, py); }
      }
      return { stroke: drawn };
    };
    const extent = () => {
      let low = Infinity, high = -Infinity;
      const [from, to] = chart.view;
      for (const { xs, ys } of chart.lines) {
        const last = Math.min(xs.length - 1, place(xs, to));
        for (let i = Math.max(0, place(xs, from) - 1); i <= last; i += 1) {
          const y = ys[i];
          if (y === null) continue;
          if (y < low) low = y;
          if (y > high) high = y;
        }
      }
      if (low > high || low === 0 && high === 0) return look.log ? [1, 10] : [0, 1];
      return look.log ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.1, true);
    };
    const hover = (u) => {
      const { left, top } = u.cursor;
      let best = null;
      if (left >= 0) {
        const wanted = u.posToVal(left, "x");
        chart.lines.forEach((line, at) => {
          const next = place(line.xs, wanted);
          for (const i of [next - 1, next]) {
            if (i < 0 || i >= line.xs.length || line.ys[i] === null || line.xs[i] < chart.view[0] || line.xs[i] > chart.view[1]) continue;
            const x = u.valToPos(line.xs[i], "x"), y = u.valToPos(line.ys[i], "y"), away = Math.abs(y - top) + Math.abs(x - left) / 4;
            if (!best || away < best.away) best = { away, at, i, x, y };
          }
        });
      }
      tip.hidden = dot.hidden = !best;
      if (!best) return;
      const line = chart.lines[best.at];
      tip.textContent = `${line.label}  ${look.y(line.ys[best.i])}  at ${look.x(line.xs[best.i])}`;
      tip.style.left = `${Math.max(0, Math.min(left + 12, u.over.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${top > 40 ? top - 34 : top + 14}px`;
      dot.style.transform = `translate(${best.x}px, ${best.y}px)`;
      dot.style.background = line.colour;
    };

    let timer;
    const settled = () => {
      const [min, max] = chart.view, part = min > chart.all[0] || max < chart.all[1];
      area.parentElement.classList.toggle("part", part);
      clearTimeout(timer);
      timer = setTimeout(() => part ? zoomed(min, max) : zoomed(), 250);
    };
    // Borders along the axis: logarithms, where it is logarithmic.
    const along = (borders) => look.logX ? borders.map(Math.log10) : borders;
    const show = (min, max) => {
      const [first, last] = along(chart.all), width = Math.min(max - min, last - first), from = Math.max(first, Math.min(min, last - width));
      const back = look.logX ? power : same;
      chart.u.setScale("x", { min: back(from), max: back(from + width) });
    };
    chart.pan = (part) => { const [min, max] = along(chart.view), by = (max - min) * part; show(min + by, max + by); };
    chart.zoom = (times) => { const [min, max] = along(chart.view), mid = (min + max) / 2, half = (max - min) * times / 2; show(mid - half, mid + half); };
    const keys = { ArrowLeft: () => chart.pan(-0.2), ArrowRight: () => chart.pan(0.2), "+": () => chart.zoom(0.5), "-": () => chart.zoom(2), 0: () => show(...along(chart.all)) };
    area.tabIndex = 0;
    area.setAttribute("role", "group");
    area.setAttribute("aria-label", `Curve of ${title}. Keys: plus and minus zoom, arrows move, 0 shows all.`);
    area.onkeydown = (event) => { if (chart.u && !event.ctrlKey && !event.metaKey && keys[event.key]) { event.preventDefault(); keys[event.key](); } };
    area.addEventListener("wheel", (event) => {
      const by = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (!chart.u || !by || Math.abs(by) < Math.abs(event.deltaY) && !event.shiftKey) return;
      event.preventDefault();
      chart.pan(Math.sign(by) * Math.min(1, Math.abs(by) / area.clientWidth));
    }, { passive: false });

    // Show these lines: what is in view stays so, if not all was.
    chart.set = (lines, remake) => {
      const before = chart.u && (chart.view[0] > chart.all[0] || chart.view[1] < chart.all[1]) ? chart.view : null;
      chart.lines = lines;
      const first = Math.min(...lines.map(({ xs }) => xs[0])), last = Math.max(...lines.map(({ xs }) => xs[xs.length - 1]));
      chart.all = first < last ? [first, last] : look.logX ? [first / 2, first * 2] : [first - 0.5, first + 0.5];
      const series = [{ label: look.axis }];
      lines.forEach((line, at) => {
        const plain = { label: line.label, stroke: line.colour, dash: line.dash, auto: false, points: { show: false } };
        series.push({ ...plain, width: line.smooth ? 1 : 1.5, alpha: line.smooth ? 0.28 : 1, paths: path(at, false) });
        if (line.smooth) series.push({ ...plain, width: 2, paths: path(at, true) });
      });
      const table = [chart.all, ...series.slice(1).map(() => [null, null])];
      if (chart.u && !remake) { chart.u.setData(table, !before); if (before) show(...along(before)); return; }
      chart.end();
      area.textContent = "";
      const grid = { stroke: look.css("--line"), width: 1 }, stroke = look.css("--dim"), font = "11px system-ui, sans-serif";
      chart.u = new uPlot({
        width: area.clientWidth, height: HEIGHT, series, legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        scales: { x: { time: false, distr: look.logX ? 3 : 1, range: (_, min, max) => (chart.view = [min, max]) }, y: { distr: look.log ? 3 : 1, range: extent } },
        axes: [
          { stroke, grid, font, ticks: grid, size: 30, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : look.tick(tick)), space: 60 },
          { stroke, grid, font, ticks: grid, size: 60, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : look.y(tick)) },
        ],
        hooks: { init: [(u) => u.over.append(dot, tip)], setCursor: [hover], setScale: [(_, key) => { if (key === "x") settled(); }] },
      }, table, area);
      if (before && !remake) show(...along(before));
    };
    chart.fit = () => { const width = area.clientWidth; if (chart.u && width && Math.abs(width - chart.u.width) > 1) chart.u.setSize({ width, height: HEIGHT }); };
    chart.end = () => { clearTimeout(timer); chart.u?.destroy(); chart.u = null; };
    return chart;
  };
})();
