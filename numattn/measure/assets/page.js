"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { groups, places, rows } = data;
  const narrow = () => window.innerWidth < 700;

  // --- numbers: what numattn.measure.report computes, on the rows that the filters leave -------

  // JSON has no word for NaN and infinities; they come as texts.
  const value = (name, i) => {
    const x = rows[name] ? rows[name][i] : null;
    return x === null ? null : Number(x);
  };

  function median(numbers) {
    if (numbers.some(Number.isNaN)) return NaN;
    const sorted = [...numbers].sort((a, b) => (a < b ? -1 : a > b ? 1 : 0));
    const half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }

  // Median over inputs of the median over an input's rows; null where nothing was measured.
  function middle(chosen, name) {
    const parts = new Map();
    for (const i of chosen) {
      const x = value(name, i);
      if (x === null) continue;
      const setting = places[rows.place[i]].setting;
      if (!parts.has(setting)) parts.set(setting, []);
      parts.get(setting).push(x);
    }
    return parts.size ? median([...parts.values()].map(median)) : null;
  }

  function worst(chosen, name) {
    const numbers = chosen.map((i) => value(name, i)).filter((x) => x !== null);
    return numbers.length ? Math.max(...numbers) : null;
  }

  // Two or three significant digits, in at most seven characters.
  function number(x) {
    if (x === null || x === undefined) return "";
    if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf";
    if (x === 0) return "0";
    x = Number(x.toPrecision(3));
    if (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e4)
      return x.toExponential(1).replace(/e\+(\d)$/, "e$1");
    const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(x))));
    return x.toFixed(Math.min(digits, Math.abs(x) < 0.1 ? 4 : 3));
  }

  const MEASURES = [
    ["error", (at) => middle(at, "output")],
    ["worst", (at) => worst(at, "output")],
    ["TV", (at) => middle(at, "tv_median")],
    ["TV95", (at) => middle(at, "tv_p95")],
    ["eff.", (at) => middle(at, "efficiency")],
    ["over.", (at) => middle(at, "overhead")],
    ["b.eff.", (at) => middle(at, "block_efficiency")],
    ["FLOPs", (at) => middle(at, "relative_flops")],
    ["time", (at) => middle(at, "time_ratio")],
    ["bytes", (at) => middle(at, "relative_bytes")],
    ["proj.", (at) => middle(at, "projected")],
    ["inputs", (at) => new Set(at.map((i) => places[rows.place[i]].setting)).size],
  ];

  // --- filters ---------------------------------------------------------------------------------

  const OF_GROUP = { family: "Pillars", method: "Methods" };
  const OF_PLACE = { input: "Inputs", causal: "Causal", tag: "Head types", mode: "Modes" };
  const chosen = {};
  const distinct = (things, key) => [...new Set(things.map((thing) => thing[key]))];
  for (const key of Object.keys(OF_GROUP)) chosen[key] = new Set(distinct(groups, key));
  for (const key of Object.keys(OF_PLACE)) chosen[key] = new Set(distinct(places, key));
  chosen.precision = new Set(distinct(places, "precision").slice(0, 1));
  const all = Object.fromEntries(Object.entries(chosen).map(([key, set]) => [key, [...set]]));

  const groupPasses = (g) => Object.keys(OF_GROUP).every((key) => chosen[key].has(g[key]));
  const placePasses = (p) =>
    [...Object.keys(OF_PLACE), "precision"].every((key) => chosen[key].has(p[key]));

  let shown = []; // numbers of the rows that pass
  let lines = []; // a line per group that has such rows, with its measures

  function aggregate() {
    const inPlace = places.map(placePasses);
    const of = groups.map((g) => (groupPasses(g) ? [] : null));
    rows.group.forEach((g, i) => {
      if (of[g] && inPlace[rows.place[i]]) of[g].push(i);
    });
    shown = of.flatMap((at) => at || []);
    lines = groups.flatMap((group, g) =>
      of[g] && of[g].length
        ? [{ group, at: of[g], ...Object.fromEntries(MEASURES.map(([k, f]) => [k, f(of[g])])) }]
        : []
    );
    return lines;
  }

  // --- small pieces of the document ------------------------------------------------------------

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, x] of Object.entries(properties))
      if (key === "role" || key.includes("-")) element.setAttribute(key, x);
      else element[key] = x;
    element.append(...children);
    return element;
  }

  const csv = (table) =>
    table
      .map((line) =>
        line
          .map((x) => (x === null || x === undefined ? "" : String(x)))
          .map((x) => (/[",\n]/.test(x) ? `"${x.replaceAll('"', '""')}"` : x))
          .join(",")
      )
      .join("\n") + "\n";

  const sheets = {}; // name of a figure or table -> its data as lists of cells

  function download(name) {
    const url = URL.createObjectURL(new Blob([csv(sheets[name]())], { type: "text/csv" }));
    const link = make("a", { href: url, download: `${name}.csv` });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  function actions(name) {
    const button = make("button", { type: "button", onclick: () => download(name) });
    button.append("Download CSV");
    button.setAttribute("aria-label", `Download CSV: ${name}`);
    return make("div", { className: "actions" }, button);
  }

  // --- figures ---------------------------------------------------------------------------------

  const COSTS = {
    FLOPs: {
      field: "relative_flops",
      mode: "prefill",
      title: "operations of the matrix products",
      axis: "matrix-product operations, relative to exact attention",
    },
    time: {
      field: "time_ratio",
      mode: "prefill",
      title: "measured time",
      axis: "wall time on this machine, relative to exact attention",
    },
    bytes: {
      field: "relative_bytes",
      mode: "decode",
      title: "bytes read per decoded token",
      axis: "bytes read per decoded token, relative to a full cache",
    },
  };
  const costs = Object.keys(COSTS).filter((key) => rows[COSTS[key].field]);
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "x", "cross",
    "star", "triangle-left", "triangle-right", "bowtie", "hourglass", "pentagon", "star-diamond"];
  // Okabe and Ito's, for the methods of one pillar.
  const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
  const GREY = "#6b6b6b";

  const symbols = {}; // of a line, and its colour within a pillar: by its place there
  const tints = {};
  {
    const counts = {};
    for (const { family, mode, line } of groups)
      if (!(line in symbols)) {
        counts[family + mode] = (counts[family + mode] ?? -1) + 1;
        symbols[line] = SYMBOLS[counts[family + mode] % SYMBOLS.length];
        tints[line] = PALETTE[counts[family + mode] % PALETTE.length];
      }
  }

  // The points of a figure. Exact attention, and budgets at which a method is exact but for
  // rounding, are left out.
  function pointsOf(part, cost) {
    return part.flatMap((line) => {
      const x = line[cost];
      const y = line.error;
      const floor = middle(line.at, "floor") || 0;
      const drawn = line.group.mode === COSTS[cost].mode && line.group.family !== "exact" &&
        x > 0 && y > 0 && Number.isFinite(x) && Number.isFinite(y) && y > data.rounding * floor;
      return drawn ? [{ ...line, x, y }] : [];
    });
  }

  // The points than which none is both cheaper and better; oracles are no methods to choose.
  function front(points) {
    const kept = [];
    const sorted = points.filter((p) => !p.group.oracle).sort((a, b) => a.x - b.x || a.y - b.y);
    for (const p of sorted) if (!kept.length || p.y < kept[kept.length - 1].y) kept.push(p);
    return kept;
  }

  // What looks at no key, and the rounding of the dtype; per budget where it has one.
  function baselines(at) {
    const blind = new Map();
    for (const i of at) {
      const units = value("units", i);
      if (units === null || !groups[rows.group[i]].budget) continue;
      if (!blind.has(units)) blind.set(units, []);
      blind.get(units).push(i);
    }
    const budgets = [...blind.keys()].filter((units) =>
      blind.get(units).some((i) => groups[rows.group[i]].budget === units)
    );
    const units = (budgets.length ? budgets : [...blind.keys()]).sort((a, b) => a - b);
    const precision = [...chosen.precision][0] ?? "";
    return [
      ["mean of values", "", at, "mean_baseline"],
      ...units.map((u) => [
        "uniform keys", u, at.filter((i) => value("units", i) === u), "uniform_baseline",
      ]),
      [`${precision} floor`, "", at, "floor"],
    ].map(([name, budget, part, field]) => ({
      name, budget, field, error: middle(part, field), worst: worst(part, field),
    }));
  }

  function ticks(low, high) {
    const steps = high - low < 2.2 ? [1, 2, 5] : [1];
    const values = [];
    for (let power = Math.floor(low) - 3; power <= high + 3; power++)
      for (const step of steps) values.push(Number(`${step}e${power}`));
    return values;
  }

  const tickText = (x) => (x < 1e-3 || x >= 1e4 ? x.toExponential(0).replace("e+", "e") : String(x));

  function axis(title, low, high, suffix) {
    const values = ticks(low, high);
    return {
      type: "log", range: [low, high], title: { text: title, standoff: 8, font: { size: 13 } },
      tickvals: values, ticktext: values.map((x) => tickText(x) + suffix), tickangle: 0,
      gridcolor: "#e8e8e8", zeroline: false, linecolor: "#8c8c8c", ticks: "outside",
      tickcolor: "#8c8c8c", fixedrange: narrow(), automargin: true,
    };
  }

  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  // A list with commas, in lines of at most 44 letters where it can be cut.
  function wrapped(list) {
    const lines = [""];
    for (const part of list.split(", ")) {
      const last = lines[lines.length - 1];
      if (last && last.length + part.length > 42) lines.push(part);
      else lines[lines.length - 1] = last ? `${last}, ${part}` : part;
    }
    return lines.map(plain).join(",<br>");
  }

  function hover(p) {
    const { group } = p;
    const say = (name, x) => (x === null ? [] : [`${name} ${number(x)}`]);
    return [
      `<b>${plain(group.label)}</b>${group.budget === null ? "" : `, budget ${group.budget}`}`,
      wrapped(group.options ? `${group.family}, ${group.options}` : group.family),
      [`error ${number(p.error)}`, `worst ${number(p.worst)}`].join(", "),
      [...say("TV", p.TV), ...say("eff.", p["eff."])].join(", "),
      [...say("FLOPs", p.FLOPs), ...say("time", p.time), ...say("bytes", p.bytes)].join(", "),
      `${p.inputs} ${p.inputs === 1 ? "input" : "inputs"}`,
    ].filter(Boolean).join("<br>");
  }

  function traces(points, named) {
    const curves = new Map();
    for (const p of points) {
      if (!curves.has(p.group.line)) curves.set(p.group.line, []);
      curves.get(p.group.line).push(p);
    }
    return [...curves.values()].map((curve) => {
      const { family, oracle, own, label, line } = curve[0].group;
      const color = named ? tints[line] : data.colors[family];
      const grows = (_, i) => (curve.length === 1 ? 8 : 6 + Math.min(2 * i, 8));
      return {
        x: curve.map((p) => p.x), y: curve.map((p) => p.y), mode: "lines+markers",
        name: plain(label), showlegend: named, type: "scatter",
        line: { color, width: 1.4, dash: oracle ? "dash" : "solid" },
        marker: {
          symbol: symbols[line] + (own ? "-open" : ""), size: curve.map(grows), opacity: 1,
          color, line: { color, width: own ? 1.5 : 0 },
        },
        text: curve.map(hover), hovertemplate: "%{text}<extra></extra>",
      };
    });
  }

  // Lines of the baselines, and notes of what lies below the figure.
  function guides(base, low) {
    const grey = (text, position) => ({
      text, textposition: position, font: { size: 11, color: GREY }, padding: 2,
    });
    const wide = { type: "line", xref: "paper", x0: 0, x1: 1, layer: "below" };
    const shapes = [{
      type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, layer: "below",
      line: { color: "#000", width: 0.8 },
    }];
    const notes = [{
      x: Math.log10(1), y: 1, xref: "x", yref: "paper", text: "exact", showarrow: false, xanchor: "left",
      yanchor: "bottom", font: { size: 11, color: GREY },
    }];
    const [mean] = base.filter((b) => b.field === "mean_baseline");
    if (mean.error > 0)
      shapes.push({
        ...wide, y0: mean.error, y1: mean.error, line: { color: GREY, width: 1.2, dash: "dot" },
        label: grey(mean.name, "end"),
      });
    const blind = base.filter((b) => b.field === "uniform_baseline" && b.error > 0);
    if (blind.length) {
      const errors = blind.map((b) => b.error);
      const budgets = [...new Set([blind[0].budget, blind[blind.length - 1].budget])];
      shapes.push({
        ...wide, type: "rect", y0: Math.min(...errors), y1: Math.max(...errors),
        line: { width: 0 }, fillcolor: "rgba(110,110,110,0.16)",
        label: grey(`${budgets.join(" to ")} uniform keys`, "top left"),
      });
    }
    const [floor] = base.filter((b) => b.field === "floor");
    if (floor.error > 0 && Math.log10(floor.error) > low)
      shapes.push({
        ...wide, y0: floor.error, y1: floor.error, line: { color: "#000", width: 0.8 },
        label: grey(floor.name, "start"),
      });
    else if (floor.error > 0)
      notes.push({
        xref: "paper", yref: "paper", x: 0, y: 0, xanchor: "left", yanchor: "bottom",
        text: `${plain(floor.name)} ${number(floor.error)}, below this axis \u2193`,
        showarrow: false, font: { size: 11, color: GREY },
      });
    return { shapes, annotations: notes };
  }

  const DEAR = 4; // times exact attention's cost: what is dearer is outside of the usual view
  const DEEP = 1e-4; // and so are errors below this, if there are larger ones

  const usual = (p) => p.x <= DEAR && p.y >= DEEP;

  function extent(numbers) {
    const logs = numbers.filter((x) => x > 0 && Number.isFinite(x)).map(Math.log10);
    const [low, high] = [Math.min(...logs), Math.max(...logs)];
    const pad = Math.max(0.06 * (high - low), 0.05);
    return [low - pad, high + pad];
  }

  // One figure: error against a cost. `pick` gives the cost and the lines to draw.
  function figure(home, name, pick, named) {
    const caption = make("figcaption");
    const legend = make("ul", { className: "legend" });
    const plot = make("div", { className: "plot" });
    const toggle = () => {
      state.whole = !state.whole;
      view();
    };
    const range = make("button", { type: "button", onclick: toggle });
    const buttons = actions(name);
    buttons.append(range);
    home.append(make("figure", { id: name }, caption, legend, plot, buttons));
    const state = { points: [], best: [], base: [], cost: null, left: 0, whole: false };
    sheets[name] = () => [
      ["figure", "pillar", "method", "options", "budget", "mode", `relative ${state.cost}`,
        "error", "worst", "TV", "efficiency", "inputs", "on the front"],
      ...state.points.map((p) => [
        name, p.group.family, p.group.method, p.group.options, p.group.budget, p.group.mode, p.x,
        p.y, p.worst, p.TV, p["eff."], p.inputs, state.best.includes(p) ? "yes" : "no",
      ]),
      ...state.base.filter((b) => b.error !== null).map((b) => [
        name, "", b.name, "", b.budget, "", "", b.error, b.worst, "", "", "", "",
      ]),
    ];

    function view() {
      const outside = state.points.filter((p) => !usual(p)).length;
      range.hidden = !outside || outside === state.points.length;
      range.textContent = state.whole
        ? "Usual range"
        : `Show ${outside} further ${outside === 1 ? "point" : "points"}`;
      if (!state.points.length) {
        Plotly.purge(plot);
        const note = state.left
          ? "Nothing to draw: what the filters leave is exact but for rounding, or was not costed."
          : "Nothing to draw with these filters.";
        plot.replaceChildren(make("p", { className: "empty" }, note));
        return;
      }
      if (plot.querySelector(".empty")) plot.replaceChildren();
      draw(plot, state, named);
    }

    return () => {
      const { cost, part } = pick();
      state.cost = cost;
      state.left = part.length;
      state.points = pointsOf(part, cost);
      state.best = front(state.points);
      const { mode } = COSTS[cost];
      state.base = baselines(part.flatMap((line) => (line.group.mode === mode ? line.at : [])));
      caption.textContent = `Error against ${COSTS[cost].title}`;
      const families = [...new Set(state.points.map((p) => p.group.family))];
      legend.replaceChildren(
        ...(named ? [] : families).map((family) => {
          const swatch = make("i");
          swatch.style.background = data.colors[family];
          return make("li", {}, swatch, family);
        })
      );
      view();
    };
  }

  function draw(plot, { points, best, base, cost, whole }, named) {
    const small = narrow();
    const near = whole || !points.some(usual) ? points : points.filter(usual);
    const mean = base.filter((b) => b.field === "mean_baseline").map((b) => b.error);
    const y = extent([...near.map((p) => p.y), ...mean]);
    const x = extent([...near.map((p) => p.x), 1]);
    const curves = traces(points, named);
    const edge = {
      x: best.map((p) => p.x), y: best.map((p) => p.y), mode: named || small ? "lines" : "lines+text",
      text: best.map(({ group }, i) =>
        best.findIndex((p) => p.group.line === group.line) === i ? plain(group.method) : ""),
      textposition: "bottom left", textfont: { size: 11, color: "#1b1b1b" },
      line: { color: "rgba(0,0,0,0.5)", width: 2.2, shape: "hv" }, type: "scatter",
      name: "front", hoverinfo: "skip", showlegend: named,
    };
    const longest = Math.max(...curves.map((curve) => curve.name.length), 5);
    const entry = Math.min(8 + 6.6 * longest, plot.clientWidth - 120); // pixels of a name
    const perRow = Math.max(1, Math.floor((plot.clientWidth - 70) / (entry + 42)));
    const keys = named ? Math.ceil((curves.length + 1) / perRow) * 20 + 14 : 0;
    const { shapes, annotations } = guides(base, y[0]);
    const across = COSTS[cost].axis.replace(", ", small ? ",<br>" : ", ");
    const layout = {
      height: (small ? 360 : 470) + keys, margin: { l: 55, r: 14, t: 18, b: small ? 62 : 48 }, shapes,
      annotations, font: { family: FONT, size: 12, color: "#1b1b1b" }, dragmode: small ? false : "zoom",
      paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "closest",
      hoverlabel: { bgcolor: "#fff", bordercolor: "#8c8c8c", font: { color: "#1b1b1b" }, align: "left" },
      xaxis: axis(across, ...x, "\u00d7"),
      yaxis: axis("relative error of the output", ...y, ""),
      showlegend: named,
      legend: { orientation: "h", x: 0, xref: "container", xanchor: "left", y: 0, yref: "container",
        yanchor: "bottom", entrywidth: entry, font: { size: 12 } },
    };
    Plotly.react(plot, [edge, ...curves], layout, {
      responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
      typesetMath: false, displayModeBar: small ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    });
  }

  // --- tables ----------------------------------------------------------------------------------

  // A table that a click on a column's name sorts. `pick` gives head, lines of raw cells, and the
  // lines at which something new begins.
  function table(home, name, title, pick) {
    const head = make("thead");
    const body = make("tbody");
    const heading = make("h3", { id: `${name}-title` }, title);
    const inner = make("table", { "aria-labelledby": heading.id }, head, body);
    const scroll = make("div", { className: "scroll", tabIndex: 0, "aria-labelledby": heading.id,
      role: "region" }, inner);
    home.append(heading, scroll, actions(name));
    let order = null; // column and direction
    const state = { header: [], body: [] };
    sheets[name] = () => [state.header, ...state.body];

    function sorted() {
      if (!order || !state.header.includes(order.column)) return state.body;
      const at = state.header.indexOf(order.column);
      const compare = (a, b) => {
        if (a[at] === b[at]) return 0;
        if (a[at] === null || a[at] === "") return 1; // what is missing comes last
        if (b[at] === null || b[at] === "") return -1;
        return (a[at] < b[at] ? -1 : 1) * order.sign;
      };
      return [...state.body].sort(compare);
    }

    function cell(x, column) {
      if (typeof x !== "number") return x ?? "";
      return column === "budget" || column === "inputs" ? String(x) : number(x);
    }

    function render() {
      const cells = state.header.map((column) => {
        const press = () => {
          order = { column, sign: order && order.column === column ? -order.sign : 1 };
          render();
        };
        const button = make("button", { type: "button", onclick: press }, column);
        const th = make("th", { scope: "col" }, button);
        if (order && order.column === column)
          th.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
        return th;
      });
      head.replaceChildren(make("tr", {}, ...cells));
      body.replaceChildren(
        ...sorted().map((line, i, part) =>
          make(
            "tr",
            { className: !order && i && part[i - 1][0] !== line[0] ? "first" : "" },
            ...line.map((x, at) =>
              make(at ? "td" : "th", at ? {} : { scope: "row" }, cell(x, state.header[at])))
          )
        )
      );
      if (!state.body.length) {
        const note = make("td", { className: "empty" }, "No rows with these filters.");
        body.replaceChildren(make("tr", {}, note));
      }
    }

    return () => {
      const { header, body: given } = pick();
      const kept = header
        .map((_, at) => at)
        .filter((at) => at === 0 || given.some((line) => line[at] !== null && line[at] !== ""));
      state.header = kept.map((at) => header[at]);
      state.body = given.map((line) => kept.map((at) => line[at]));
      render();
    };
  }

  function methodTable(part) {
    const modes = new Set(part.map((line) => line.group.mode)).size > 1;
    return {
      header: ["method", "mode", "budget", ...MEASURES.map(([name]) => name)],
      body: part.map((line) => [
        line.group.label, modes ? line.group.mode : "", line.group.budget,
        ...MEASURES.map(([name]) => line[name]),
      ]),
    };
  }

  function baselineTable() {
    const modeOf = (i) => places[rows.place[i]].mode;
    const modes = [...new Set(shown.map(modeOf))];
    return {
      header: ["baseline", "mode", "budget", "error", "worst"],
      body: modes.flatMap((mode) =>
        baselines(shown.filter((i) => modeOf(i) === mode))
          .filter((b) => b.error !== null)
          .map((b) => [b.name, modes.length > 1 ? mode : "", b.budget, b.error, b.worst])
      ),
    };
  }

  // Who could not run, and why, each reason once.
  function refusals(home, families) {
    const list = make("ul");
    const box = make("details", {}, make("summary", {}, "What did not run"), list);
    home.append(box);
    return () => {
      const reasons = new Map();
      for (const [g, p, text] of data.refused) {
        if (!families.includes(groups[g].family) || !groupPasses(groups[g])) continue;
        if (!placePasses(places[p])) continue;
        if (!reasons.has(text)) reasons.set(text, new Set());
        reasons.get(text).add(places[p].input);
      }
      box.hidden = !reasons.size;
      box.open = !rows.group.length;
      list.replaceChildren(
        ...[...reasons].map(([text, names]) => make("li", {}, `${text} (on ${[...names].join(", ")})`))
      );
    };
  }

  // --- the heads' matrices ---------------------------------------------------------------------

  const { side: GRID, decades, steps: STEPS } = data.picture;
  const LOW = -2; // of the colours: log10 of a tile's mean weight relative to 1 / N
  const HIGH = Math.log10(GRID); // the most of a tile: all that its rows have
  const RAMP = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779",
    "#6ece58", "#b5de2b", "#fde725"]; // viridis, told apart by colour-blind readers too

  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

  function color(log) {
    const share = Math.min(Math.max((log - LOW) / (HIGH - LOW), 0), 1) * (RAMP.length - 1);
    const at = Math.min(Math.floor(share), RAMP.length - 2);
    const [a, b] = [rgb(RAMP[at]), rgb(RAMP[at + 1])];
    return a.map((x, i) => Math.round(x + (share - at) * (b[i] - x)));
  }

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // log10 of the mean weight relative to 1 / N; null where there is nothing.
  const logOf = (step) => (step ? (2 * decades * (step - 1)) / (STEPS - 1) - decades : null);

  function paint(canvas, steps) {
    const image = new ImageData(GRID, GRID);
    steps.forEach((step, i) => {
      const log = logOf(step);
      image.data.set([...(log === null ? [255, 255, 255] : color(log)), 255], 4 * i);
    });
    canvas.width = canvas.height = GRID;
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  function explorer(home) {
    if (!data.pictures.length) {
      home.append(make("p", {}, "These rows hold no pictures of the matrices."));
      return () => {};
    }
    const input = make("select", { id: "at-input" });
    const head = make("select", { id: "at-head" });
    const slider = make("input", { type: "range", min: 0, step: 1, id: "at-budget" });
    const says = make("output", { htmlFor: "at-budget" });
    const grid = make("div", { className: "matrices" });
    const readout = make("p", { id: "readout" }, "Point at a matrix to read its tiles.");
    const label = (text, ...parts) => make("label", { className: "choice" }, text, ...parts);
    const ramp = make("canvas", { className: "ramp", width: 256, height: 1, role: "img",
      "aria-label": "colours, from a hundredth of 1/N or less to 32 times 1/N" });
    const strip = new ImageData(256, 1);
    for (let i = 0; i < 256; i++)
      strip.data.set([...color(LOW + ((HIGH - LOW) * i) / 255), 255], 4 * i);
    ramp.getContext("2d").putImageData(strip, 0, 0);
    home.append(
      make("p", {}, "Attention matrices of one head, queries from top to bottom, keys from left " +
        "to right, as the mean weights of 32 \u00d7 32 tiles: exact, and as each method's output " +
        "implies them, at the largest of its budgets that is not above the chosen one. Under " +
        "each, the error of the head's output."),
      make("div", { className: "explorer" }, label("Input", input), label("Head", head),
        label("Budget", slider, says)),
      ramp,
      make("div", { className: "ticks" }, ...[0.01, 0.1, 1, 10].map((x) => {
        const tick = make("span", {}, String(x));
        tick.style.left = `${(100 * (Math.log10(x) - LOW)) / (HIGH - LOW)}%`;
        return tick;
      })),
      make("p", { className: "note" }, "Weight relative to the mean weight 1/N. White: none."),
      readout, grid, actions("heads")
    );

    let drawn = []; // what is shown: input, head, group, error, steps
    let limit = null; // the budget chosen, which stays when the head changes
    let turn = 0; // of drawing: a later one makes an earlier one stop
    sheets.heads = () => [
      ["input", "head", "method", "budget", "error", "tile of queries", "tile of keys",
        "log10 weight relative to 1/N"],
      ...drawn.flatMap(({ name, at, group, error, steps }) => Array.from(steps, (step, i) => [
        name, at, group.label, group.budget, error, Math.floor(i / GRID), i % GRID, logOf(step),
      ])),
    ];

    function fill(select, options) {
      const before = select.value;
      select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
      if (options.some(([value]) => String(value) === before)) select.value = before;
    }

    const here = () => data.pictures.filter(([p, h]) =>
      String(p) === input.value && String(h) === head.value);

    function budgets() {
      const found = here().map(([, , g]) => groups[g].budget).filter((b) => b !== null);
      return [...new Set(found)].sort((a, b) => a - b);
    }

    // Of each line, the picture at the largest budget up to the chosen one, else the smallest.
    function picked() {
      const best = new Map();
      for (const picture of here()) {
        const group = groups[picture[2]];
        if (!groupPasses(group) && group.family !== "exact") continue;
        const old = best.get(group.line);
        const rank = (g) => (g.budget === null ? 0 : g.budget <= limit ? g.budget : -g.budget);
        if (!old || rank(group) > rank(groups[old[2]])) best.set(group.line, picture);
      }
      return [...best.values()].sort((a, b) => a[2] - b[2]);
    }

    async function show() {
      const mine = ++turn;
      const choices = budgets();
      limit ??= choices[choices.length >> 1] ?? null;
      slider.max = Math.max(choices.length - 1, 0);
      slider.value = Math.max(choices.filter((budget) => budget <= limit).length - 1, 0);
      slider.disabled = choices.length < 2;
      says.textContent = choices[Number(slider.value)] ?? "";
      const pictures = picked();
      const steps = await Promise.all(pictures.map((picture) => unpack(picture[4])));
      if (mine !== turn) return;
      drawn = pictures.map(([p, at, g, error], i) => ({
        name: places[p].input, at, group: groups[g],
        error: error === null ? null : Number(error), steps: steps[i],
      }));
      grid.replaceChildren(...drawn.map(tile));
    }

    function tile({ group, error, steps }) {
      const label = group.family === "exact" ? group.method : group.label;
      const name = group.budget === null ? label : `${label} ${group.budget}`;
      const below = `error ${number(error)}`;
      const canvas = make("canvas", { role: "img", "aria-label": `${name}, ${below}` });
      paint(canvas, steps);
      canvas.onpointermove = (event) => {
        const box = canvas.getBoundingClientRect();
        const tileAt = (x, size) => Math.min(GRID - 1, Math.max(0, Math.floor((GRID * x) / size)));
        const row = tileAt(event.clientY - box.top, box.height);
        const column = tileAt(event.clientX - box.left, box.width);
        const log = logOf(steps[GRID * row + column]);
        readout.textContent = `${name}: queries ${row + 1}/${GRID}, keys ${column + 1}/${GRID}: ` +
          (log === null ? "none" : `${number(10 ** log)} times 1/N`);
      };
      const caption = make("figcaption", {}, make("b", {}, name), below);
      return make("figure", {}, canvas, caption);
    }

    function restart() {
      const found = new Set(data.pictures.map(([p]) => p));
      const several = distinct(places, "length").length > 1;
      fill(input, [...found].filter((p) => placePasses(places[p])).map((p) =>
        [p, places[p].input + (several ? `, ${places[p].length} tokens` : "")]));
      const heads = new Set(data.pictures.filter(([p]) => String(p) === input.value).map(([, h]) => h));
      fill(head, [...heads].map((h) => [h, String(h)]));
      return show();
    }

    input.onchange = restart;
    head.onchange = show;
    slider.oninput = () => {
      limit = budgets()[Number(slider.value)];
      show();
    };
    return restart;
  }

  // --- the page --------------------------------------------------------------------------------

  const parts = []; // functions that draw a part anew
  let sectionCost = costs[0];

  function filterBox(key, title) {
    const values = all[key];
    if (values.length < 2) return null;
    const summary = make("summary");
    const boxes = values.map((x) => make("input", { type: "checkbox", value: x, checked: true }));
    const count = () => {
      const some = chosen[key].size < values.length ? `${chosen[key].size} of ` : "";
      summary.textContent = `${title}: ${some}${values.length}`;
    };
    const apply = () => {
      chosen[key] = new Set(values.filter((_, i) => boxes[i].checked));
      refresh();
    };
    const set = (on) => () => {
      boxes.forEach((box) => (box.checked = on));
      apply();
    };
    boxes.forEach((box) => (box.onchange = apply));
    parts.push(() => {
      boxes.forEach((box, i) => (box.checked = chosen[key].has(values[i])));
      count();
    });
    count();
    const both = make("div", { className: "both" },
      make("button", { type: "button", onclick: set(true) }, "all"),
      make("button", { type: "button", onclick: set(false) }, "none"));
    const panel = make("div", { className: values.length > 8 ? "panel many" : "panel", role: "group",
      "aria-label": title }, both, ...boxes.map((box, i) => make("label", {}, box, ` ${values[i]}`)));
    const filter = make("details", { className: "filter" }, summary, panel);
    filter.ontoggle = () => {
      if (!filter.open) return;
      for (const other of document.querySelectorAll(".filter[open]"))
        if (other !== filter) other.open = false;
    };
    return filter;
  }

  function pickBox(title, options, value, change) {
    if (options.length < 2) return null;
    const select = make("select", { onchange: () => change(select.value) },
      ...options.map(([x, text]) => make("option", { value: x, selected: x === value }, text)));
    return make("label", { className: "choice" }, title, select);
  }

  function refresh() {
    aggregate();
    const methods = new Set(lines.map((line) => line.group.method)).size;
    const input = ({ input, length }) => `${input} ${length}`;
    const seen = new Set(shown.map((i) => input(places[rows.place[i]]))).size;
    document.getElementById("shown").textContent =
      `Shown: ${methods} of ${distinct(groups, "method").length} methods on ${seen} of ` +
      `${new Set(places.map(input)).size} inputs. Medians over heads and seeds of an input, ` +
      "then over inputs.";
    for (const part of parts) part();
  }

  function build() {
    const form = document.getElementById("filters");
    form.onsubmit = (event) => event.preventDefault();
    const precisions = distinct(places, "precision").map((x) => [x, x]);
    const boxes = [
      ...Object.entries({ ...OF_GROUP, ...OF_PLACE }).map(([key, title]) => filterBox(key, title)),
      pickBox("Precision", precisions, precisions.length ? precisions[0][0] : "", (x) => {
        chosen.precision = new Set([x]);
        refresh();
      }),
      pickBox("Cost in the pillars", costs.map((x) => [x, x]), sectionCost, (x) => {
        sectionCost = x;
        refresh();
      }),
    ];
    form.append(...boxes.filter(Boolean));
    form.hidden = !form.children.length;
    document.addEventListener("pointerdown", (event) => {
      for (const open of document.querySelectorAll(".filter[open]"))
        if (!open.contains(event.target)) open.open = false;
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      for (const open of document.querySelectorAll(".filter[open]")) open.open = false;
    });

    const measured = rows.group.length > 0;
    const overview = document.getElementById("overview");
    if (measured) {
      for (const cost of costs)
        parts.push(figure(overview, `error-${cost.toLowerCase()}`, () => ({ cost, part: lines }), false));
      parts.push(table(overview, "baselines", "What looks at no key, and the rounding", baselineTable));
    }
    const pillars = [...document.querySelectorAll("section[data-family]")];
    const named = pillars.map((section) => section.dataset.family);
    parts.push(refusals(overview, data.families.filter((family) => !named.includes(family))));
    for (const section of pillars) {
      const { family } = section.dataset;
      const own = () => lines.filter((line) => line.group.family === family);
      if (measured && costs.length)
        parts.push(figure(section, `${family}-front`, () => ({ cost: sectionCost, part: own() }), true));
      if (measured) parts.push(table(section, `${family}-table`, "Numbers", () => methodTable(own())));
      parts.push(refusals(section, [family]));
    }
    parts.push(explorer(document.getElementById("heads")));
    refresh();
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (Math.abs(window.innerWidth - width) < 40) return;
      width = window.innerWidth;
      refresh();
    });
  }

  build();

  // For scripts of the reader: what is shown, as numbers.
  window.numattn = {
    data,
    number,
    lines: () => lines.map(({ group, at, ...numbers }) => ({ ...group, ...numbers })),
    baselines: baselineTable,
    csv: (name) => csv(sheets[name]()),
    filter(key, values) {
      chosen[key] = new Set(values);
      refresh();
    },
  };
})();
