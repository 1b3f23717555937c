"""Style and script of every report page; no part of them comes from a run."""

STYLE = """
:root{--back:#ffffff;--card:#f6f7f9;--text:#16191d;--dim:#5b6470;--line:#d9dde3;--accent:#2563eb;--warn:#b45309;
--shade:#0000004d}
@media (prefers-color-scheme:dark){:root:not([data-theme=light]){--back:#14171b;--card:#1c2026;--text:#e8eaed;
--dim:#a0a8b3;--line:#343a43;--accent:#7aa7ff;--warn:#f0b45a;--shade:#ffffff59}}
:root[data-theme=dark]{--back:#14171b;--card:#1c2026;--text:#e8eaed;--dim:#a0a8b3;--line:#343a43;--accent:#7aa7ff;
--warn:#f0b45a;--shade:#ffffff59}
:root[data-theme=light]{color-scheme:light}:root[data-theme=dark]{color-scheme:dark}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1040px;margin:0 auto;padding:24px 20px 64px}
header{display:flex;align-items:flex-start;justify-content:space-between;gap:16px}
h1{font-size:1.7rem;line-height:1.25;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.2em 0 .5em;padding-bottom:.25em;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:0 0 .25em}
p,li,figcaption,caption{overflow-wrap:anywhere}
.about,figcaption,caption{color:var(--dim)}
figcaption,caption{font-size:.875rem}
caption{caption-side:bottom;text-align:left;padding-top:.5em}
.verdict{list-style:none;margin:1em 0;padding:.75em 1em;background:var(--card);border-left:4px solid var(--accent);
border-radius:6px}
.verdict li+li{margin-top:.5em}
.verdict li:first-child{font-weight:600}
.note{color:var(--dim)}
.warning{border-left:4px solid var(--warn);padding-left:1em}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:1em 0}
.card{padding:10px 14px 12px;background:var(--card);border:1px solid var(--line);border-top:4px solid;border-radius:8px}
.card h3{overflow-wrap:anywhere}.card strong{display:block;font-size:1.75rem;line-height:1.3}
.card span{display:block;color:var(--dim);font-size:.875rem}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:.3em 1.2em;padding:.75em 1em;background:var(--card);
border-left:4px solid var(--accent);border-radius:6px}
.facts dt{color:var(--dim)}.facts dd{margin:0;overflow-wrap:anywhere}
figure{margin:1.5em 0;padding:14px 14px 10px;background:var(--card);border:1px solid var(--line);border-radius:8px}
.plot{width:100%}.plot .modebar{opacity:0;transition:opacity .2s}.plot:hover .modebar{opacity:1}
figcaption{margin-top:.5em}
@media (min-width:900px){.half{display:inline-block;vertical-align:top;width:calc(50% - 8px);margin:0 0 1.5em}
.half+.half{margin-left:8px}}
.wide{overflow-x:auto;margin:1em 0;background:
linear-gradient(to right,var(--back) 30%,transparent) left/40px 100% no-repeat local,
linear-gradient(to left,var(--back) 30%,transparent) right/40px 100% no-repeat local,
linear-gradient(to right,var(--shade),transparent) left/14px 100% no-repeat scroll,
linear-gradient(to left,var(--shade),transparent) right/14px 100% no-repeat scroll}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.35em .9em .35em 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:600}
.number{text-align:right;padding-left:.9em}
details{margin:.75em 0}
summary{cursor:pointer;color:var(--accent)}
pre{overflow-x:auto;padding:12px;background:var(--card);border:1px solid var(--line);border-radius:6px;font-size:.8rem;
white-space:pre-wrap;overflow-wrap:anywhere}
button{font:inherit;font-size:.85rem;color:var(--text);background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.35em .8em;cursor:pointer;white-space:nowrap}
@media (max-width:600px){main{padding:12px 12px 48px}h1{font-size:1.35rem}figure{padding:10px 6px 8px;margin:1em 0}
figure h3,figcaption{padding:0 4px}.facts{grid-template-columns:1fr;gap:0}.facts dd{margin-bottom:.5em}
td:not(.number){white-space:normal;overflow-wrap:break-word}.number{padding-left:.3em}
caption{max-width:calc(100vw - 24px)}}
@media print{button{display:none}figure{break-inside:avoid}}
"""

SCRIPT = """
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var root = document.documentElement, button = document.getElementById("theme");
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var names = ["auto", "light", "dark"], chosen = "auto";
  try { chosen = localStorage.getItem("siamesenorm-theme") || "auto"; } catch (error) { chosen = "auto"; }
  if (names.indexOf(chosen) < 0) { chosen = "auto"; }

  function colour(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }

  function themed(layout) {
    var narrow = window.innerWidth < 600, copy = JSON.parse(JSON.stringify(layout || {}));
    var axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"),
      tickcolor: colour("--line"), automargin: true };
    var title = { standoff: 10, font: { size: narrow ? 11 : 13, color: colour("--dim") } };
    copy.paper_bgcolor = "rgba(0,0,0,0)";
    copy.plot_bgcolor = "rgba(0,0,0,0)";
    copy.font = Object.assign({ color: colour("--text"), size: narrow ? 11 : 13, family: "system-ui, sans-serif" },
      copy.font);
    copy.margin = Object.assign(narrow ? { l: 44, r: 8, t: 10, b: 48 } : { l: 60, r: 34, t: 12, b: 60 }, copy.margin);
    copy.legend = Object.assign({ orientation: "h", yanchor: "bottom", y: 1.02, x: 0, bgcolor: "rgba(0,0,0,0)" },
      copy.legend);
    copy.modebar = { bgcolor: "rgba(0,0,0,0)", color: colour("--dim"), activecolor: colour("--accent"),
      orientation: "h" };
    copy.hoverlabel = Object.assign({ bgcolor: colour("--back"), bordercolor: colour("--line"),
      font: { color: colour("--text") } }, copy.hoverlabel);
    if (narrow) {
      (copy.annotations || []).forEach(function (note) { note.font = Object.assign({ size: 10 }, note.font); });
    }
    ["xaxis", "yaxis"].forEach(function (name) { copy[name] = copy[name] || {}; });
    Object.keys(copy).forEach(function (name) {
      if (!/^[xy]axis/.test(name)) { return; }
      copy[name] = Object.assign({}, axis, copy[name]);
      if (copy[name].title) { copy[name].title = Object.assign({}, title, copy[name].title); }
    });
    return copy;
  }

  function fitting(data) {
    return window.innerWidth >= 600 ? data : data.map(function (trace) {
      return trace.meta && trace.meta.labelled ? Object.assign({}, trace, { showscale: false }) : trace;
    });
  }

  function draw() {
    if (!window.Plotly) { return; }
    Object.keys(figures).forEach(function (name) {
      var settings = { responsive: true, displaylogo: false, displayModeBar: window.innerWidth >= 600,
        modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
        toImageButtonOptions: { filename: name, scale: 2 } };
      window.Plotly.react("plot-" + name, fitting(figures[name].data), themed(figures[name].layout), settings);
    });
  }

  function apply() {
    if (chosen === "auto") { root.removeAttribute("data-theme"); } else { root.setAttribute("data-theme", chosen); }
    button.textContent = "theme: " + chosen;
    draw();
  }

  button.hidden = false;
  button.addEventListener("click", function () {
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    try { localStorage.setItem("siamesenorm-theme", chosen); } catch (error) { /* a page from a file may have none */ }
    apply();
  });
  if (dark.addEventListener) { dark.addEventListener("change", function () { if (chosen === "auto") { draw(); } }); }
  window.addEventListener("beforeprint", draw);
  apply();
})();
"""
