// Faults that keep somebody from reading a page: contrast of text (WCAG AA), controls without names, widths.
const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
  return .2126 * r + .7152 * g + .0722 * b; };
const parse = (text) => text.match(/[\d.]+/g).map(Number);
const ground = (node) => { for (; node; node = node.parentElement) { const c = parse(getComputedStyle(node).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
const faults = [];
for (const node of document.querySelectorAll("body *")) {
  const style = getComputedStyle(node);
  if (!node.checkVisibility() || node.closest("svg, canvas, option, :disabled, [disabled]") || node.closest(".skip")) continue;
  if (![...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim())) continue;
  const a = light(parse(style.color).slice(0, 3)), b = light(ground(node));
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (ratio < 4.5) faults.push(`contrast ${ratio.toFixed(2)}: ${node.tagName}.${node.className} ${node.textContent.trim().slice(0, 30)}`);
}
const named = (node) => node.getAttribute("aria-label") || node.labels?.length || node.title || (node.tagName === "BUTTON" && node.textContent.trim());
for (const node of document.querySelectorAll("input:not([type=hidden]), select, textarea, button"))
  if (node.checkVisibility() && !named(node)) faults.push(`no name: ${node.outerHTML.slice(0, 80)}`);
for (const node of document.querySelectorAll("img")) if (node.alt === null || !node.hasAttribute("alt")) faults.push(`no alt: ${node.src}`);
if (document.querySelectorAll("h1").length !== 1) faults.push("not one h1");
if (document.documentElement.lang !== "en" || !document.title) faults.push("no language or title");
const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
if (new Set(ids).size !== ids.length) faults.push("an id twice");
if (document.documentElement.scrollWidth > innerWidth) faults.push(`wider than the window: ${document.documentElement.scrollWidth}`);
return faults;
