"use strict";
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const KINDS = ["parameters", "optimizer state", "batch and buffers", "activations", "gradients", "updates", "scratch"];
  const PLACE = { parameter: 0, state: 1, batch: 2, buffer: 2, constant: 2, activation: 3, gradient: 4, update: 5 };
  const OTHER = 3;
  const SCRATCH = 6;
  const BEFORE = ["parameter", "state", "batch", "buffer", "constant"];  // kinds that exist before the step
  const WIDTH = 1000;
  const HEIGHT = 170;
  const ROWS = 60;
  const HITS = 20;
  const order = new Intl.Collator("en", { numeric: true }).compare;
  const data = JSON.parse(document.getElementById("data").textContent);

  function bytes(count) {
    let unit = 0;
    let size = Math.abs(count);
    while (unit < UNITS.length - 1 && Number(size.toFixed(2)) >= 1024) { size /= 1024; unit += 1; }
    return (count < 0 ? "-" : "") + (unit ? size.toFixed(2) : String(size)) + " " + UNITS[unit];
  }

  function change(count) { return count > 0 ? "+" + bytes(count) : count < 0 ? bytes(count) : "0"; }

  function time(ns) { return (ns / 1e6).toFixed(3) + " ms"; }

  // An element. Texts are set as text: names are not ours.
  function element(tag, attributes, ...inside) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) { made.setAttribute(name, value); }
    made.append(...inside);
    return made;
  }

  function drawn(tag, attributes) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) { made.setAttribute(name, value); }
    return made;
  }

  // Ticks of an axis of bytes are a power of two apart, of one of times 1, 2 or 5 times a power of ten.
  function byteTicks(most) {
    let step = 1;
    while (Math.ceil(most / step) > 5) { step *= 2; }
    return Array.from({ length: Math.max(2, Math.ceil(most / step)) + 1 }, function (_, at) { return at * step; });
  }

  function timeTicks(ns) {
    const power = 10 ** Math.floor(Math.log10(Math.max(1, ns)));
    const step = [0.2, 0.5, 1, 2].map(function (each) { return each * power; })
      .find(function (each) { return Math.ceil(ns / each) <= 7; });
    return Array.from({ length: Math.ceil(ns / step) + 1 }, function (_, at) { return at * step; });
  }

  // A step with what is looked up again and again: bytes by kind during each call, and the calls by name.
  function stepOf(name, lives) {
    const count = lives.run.length;
    const levels = KINDS.map(function () { return new Float64Array(count); });
    const words = lives.words;
    const place = lives.kind.map(function (kind) { return PLACE[words[kind]] ?? OTHER; });
    lives.born.forEach(function (born, at) {
      levels[place[at]][born] += lives.nbytes[at];
      if (lives.dies[at] + 1 < count) { levels[place[at]][lives.dies[at] + 1] -= lives.nbytes[at]; }
    });
    for (const level of levels) { for (let at = 1; at < count; at += 1) { level[at] += level[at - 1]; } }
    levels[SCRATCH].set(lives.scratch);
    const totals = new Float64Array(count);
    for (const level of levels) { level.forEach(function (held, at) { totals[at] += held; }); }
    const seen = new Map();
    const places = new Map();
    const keys = lives.run.map(function (call, at) {
      const key = lives.calls[call].slice(0, 3).map(function (each) { return words[each]; }).join("|");
      seen.set(key, (seen.get(key) ?? 0) + 1);
      places.set(key + "#" + seen.get(key), at);
      return key + "#" + seen.get(key);
    });
    const peak = highest(totals, 0, count - 1);
    return { name, lives, words, place, levels, totals, keys, places, peak, count, end: lives.ends[count - 1] };
  }

  function highest(totals, first, last) {
    let found = first;
    for (let at = first + 1; at <= last; at += 1) { if (totals[at] > totals[found]) { found = at; } }
    return found;
  }

  // The call that runs at a time.
  function callAt(step, ns) {
    let low = 0;
    let high = step.count - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (step.lives.ends[middle] > ns) { high = middle; } else { low = middle + 1; }
    }
    return low;
  }

  function began(step, at) { return at ? step.lives.ends[at - 1] : 0; }

  // The same operator in the other step; where it does not run there, the nearest one before it that does.
  function sameCall(from, at, to) {
    for (let back = at; back >= 0; back -= 1) {
      const found = to.places.get(from.keys[back]);
      if (found !== undefined) { return found; }
    }
    return 0;
  }

  function callInWords(step, at) {
    const [op, module, phase, line, again] = step.lives.calls[step.lives.run[at]];
    const of = step.words[module] ? " of " + step.words[module] : "";
    const where = step.words[line] ? " " + step.words[line] : "";
    return step.words[op] + of + " (" + step.words[phase] + (again ? ", recomputed" : "") + ")" + where;
  }

  function tensorInWords(step, at) {
    const { label, shape, line, born, dies, kind } = step.lives;
    const where = step.words[line[at]] ? "at " + step.words[line[at]] : "";
    const life = BEFORE.includes(step.words[kind[at]]) ? "there before the step"
      : time(began(step, born[at])) + " to " + time(step.lives.ends[dies[at]]);
    return [step.words[shape[at]] + " " + step.words[label[at]], [where, life].filter(Boolean).join(", ")];
  }

  // The parts of a tensor's path in the table: modules, then its kind.
  function pathOf(module, kind) { return [...(module ? module.split(".") : ["(no sub-module)"]), ":" + kind]; }

  // What is alive at the moments of all steps, as a tree of modules, kinds and tensors; equal tensors of two steps are
  // one leaf.
  function treeOf(view) {
    const root = { name: "", path: "", bytes: view.steps.map(function () { return 0; }), inside: new Map() };
    function add(side, held, parts, name, leaf) {
      let node = root;
      node.bytes[side] += held;
      for (const part of [...parts, name]) {
        if (!node.inside.has(part)) {
          const zeros = view.steps.map(function () { return 0; });
          node.inside.set(part, { name: part, path: node.path + "/" + part, bytes: zeros, inside: new Map() });
        }
        node = node.inside.get(part);
        node.bytes[side] += held;
      }
      node.leaf = node.leaf ?? {};
      node.leaf[side] = leaf;
    }
    view.steps.forEach(function (step, side) {
      const at = view.at[side];
      const { born, dies, nbytes, kind, module, label, shape } = step.lives;
      const seen = new Map();
      for (let tensor = 0; tensor < born.length; tensor += 1) {
        if (born[tensor] > at || dies[tensor] < at || !view.wants(step, tensor)) { continue; }
        const parts = pathOf(step.words[module[tensor]], step.words[kind[tensor]]);
        const what = parts.join("/") + "|" + step.words[label[tensor]] + "|" + step.words[shape[tensor]];
        seen.set(what, (seen.get(what) ?? 0) + 1);
        add(side, nbytes[tensor], parts, what + "#" + seen.get(what), tensor);
      }
      const [op, of] = step.lives.calls[step.lives.run[at]].map(function (each) { return step.words[each]; });
      if (step.lives.scratch[at] && !view.terms.length && (view.kind === null || view.kind === SCRATCH)) {
        add(side, step.lives.scratch[at], pathOf(of, "scratch"), op, null);
      }
    });
    return root;
  }

  // Where a step gets a table of its own: curves, moments, kinds, search, and what is alive, in one element.
  function show(place, given) {
    const steps = given.steps.map(function (at, side) { return stepOf(given.names[side], data.steps[at]); });
    const two = steps.length === 2;
    const view = {
      steps, at: steps.map(function (step) { return step.peak; }), kind: null, terms: [], open: new Set(),
      more: new Map(), sort: two ? 2 : 0, chosen: null,
      wants: function (step, tensor) {
        if (view.kind !== null && step.place[tensor] !== view.kind) { return false; }
        if (!view.terms.length) { return true; }
        step.texts = step.texts ?? step.lives.born.map(function (_, each) {
          const { kind, module, label, line, shape } = step.lives;
          return [kind, module, label, line, shape].map(function (column) { return step.words[column[each]]; })
            .join(" ").toLowerCase();
        });
        return view.terms.every(function (term) { return step.texts[tensor].includes(term); });
      },
    };
    const most = Math.max(given.limit ?? 0, ...steps.map(function (step) { return step.totals[step.peak]; }));
    const ticks = byteTicks(most);
    const times = timeTicks(Math.max(...steps.map(function (step) { return step.end; })));
    const axis = { bytes: ticks[ticks.length - 1], time: times[times.length - 1] };

    function go(side, at) {
      view.at[side] = Math.min(steps[side].count - 1, Math.max(0, at));
      if (two) { view.at[1 - side] = sameCall(steps[side], view.at[side], steps[1 - side]); }
      render();
    }

    const charts = steps.map(function (step, side) {
      const svg = drawn("svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, preserveAspectRatio: "none", class: "curve",
        role: "slider", tabindex: 0, "aria-label": "moment in the step: " + step.name, "aria-valuemin": 0,
        "aria-valuemax": step.count - 1 });
      svg.append(drawn("rect", { class: "panel", width: WIDTH, height: HEIGHT }));
      // the highest call of each column of pixels
      const column = axis.time / WIDTH;
      const tops = [];
      for (let x = 0; x * column < step.end; x += 1) {
        tops.push(highest(step.totals, callAt(step, x * column), callAt(step, Math.min(step.end, (x + 1) * column) - 1)));
      }
      const stacked = new Float64Array(tops.length);
      const areas = step.levels.map(function (level, kind) {
        let path = "M0 " + HEIGHT;
        tops.forEach(function (at, x) {
          stacked[x] += level[at];
          path += "H" + x + "V" + (HEIGHT * (1 - stacked[x] / axis.bytes)).toFixed(1);
        });
        return drawn("path", { class: "k" + kind, d: path + "H" + (WIDTH * step.end / axis.time).toFixed(1) + "V" + HEIGHT + "Z" });
      });
      svg.append(...areas.reverse());  // the highest first: lower ones are drawn over it
      for (const [kind, held] of [...ticks.map(function (tick) { return ["grid", tick]; }), ["limit", given.limit]]) {
        const y = HEIGHT * (1 - held / axis.bytes);
        if (held !== null) { svg.append(drawn("line", { class: kind, x2: WIDTH, y1: y, y2: y })); }
      }
      const life = drawn("rect", { class: "life", height: 7, visibility: "hidden" });
      const cross = drawn("line", { class: "cross", y2: HEIGHT });
      svg.append(life, cross);
      function follow(event) {
        const box = svg.getBoundingClientRect();
        const x = Math.floor((event.clientX - box.left) / box.width * WIDTH);
        go(side, tops[Math.min(tops.length - 1, Math.max(0, x))]);
      }
      svg.addEventListener("pointerdown", function (event) { svg.setPointerCapture(event.pointerId); follow(event); });
      svg.addEventListener("pointermove", function (event) { if (event.buttons) { follow(event); } });
      svg.addEventListener("keydown", function (event) {
        const wide = Math.ceil(step.count / 50);
        const by = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -wide, PageUp: wide,
          Home: -step.count, End: step.count }[event.key];
        if (by) { event.preventDefault(); go(side, view.at[side] + by); }
      });
      const words = element("div", { class: "words", "aria-hidden": "true" });
      function word(kind, text, style) { words.append(element("span", { class: kind, style }, text)); }
      for (const tick of ticks) {
        const top = (HEIGHT * (1 - tick / axis.bytes) - 8).toFixed(1);
        word("y", tick ? bytes(tick).replace(".00", "") : "0", "top:" + top + "px");
      }
      times.forEach(function (tick, at) {
        const last = at === times.length - 1;
        word("x", String(Number((tick / 1e6).toPrecision(6))) + (last ? " ms" : ""), "left:" + (100 * tick / axis.time) + "%");
      });
      if (given.limit !== null) {
        const top = HEIGHT * (1 - given.limit / axis.bytes);
        word("limit", "limit " + bytes(given.limit), "top:" + (top > 18 ? top - 18 : top + 2).toFixed(1) + "px");
      }
      const moment = element("p", { class: "moment" });
      const head = step.name + ": at most " + bytes(step.totals[step.peak]) + ", " + time(step.end);
      place.append(element("h3", {}, head), element("div", { class: "plot" }, svg, words), moment);
      return { svg, life, cross, moment };
    });

    function button(text, action, attributes) {
      const made = element("button", { type: "button", ...attributes }, text);
      made.addEventListener("click", action);
      return made;
    }
    const search = element("input", { type: "search", "aria-label": "search modules, tensors and files",
      placeholder: "module, tensor, kind or file:line" });
    const hits = element("ol", { class: "hits" });
    const keys = element("p", { class: "keys" });
    const table = element("table", { class: two ? "alive two" : "alive" });
    const status = element("p", { class: "soft", role: "status" });
    const moves = [
      button(two ? "peak and peak" : "peak", function () {
        view.at = steps.map(function (step) { return step.peak; });
        render();
      }),
      button("\u2039 call", function () { go(0, view.at[0] - 1); }, { "aria-label": "one call back" }),
      button("call \u203a", function () { go(0, view.at[0] + 1); }, { "aria-label": "one call on" }),
    ];
    place.append(element("p", { class: "tools" }, ...moves, search), hits, keys, status, table);
    search.addEventListener("input", function () {
      view.terms = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      listHits();
      render();
    });

    // The largest tensors that a search finds, at any time; a click goes to the fullest moment of the tensor's life.
    function listHits() {
      hits.replaceChildren();
      if (!view.terms.length) { return; }
      const found = steps.flatMap(function (step, side) {
        return step.lives.nbytes.map(function (held, tensor) { return [held, side, tensor]; })
          .filter(function ([, , tensor]) { return view.wants(step, tensor); });
      }).sort(function (one, other) { return other[0] - one[0]; });
      for (const [held, side, tensor] of found.slice(0, HITS)) {
        const step = steps[side];
        const { module, kind, born, dies } = step.lives;
        const parts = pathOf(step.words[module[tensor]], step.words[kind[tensor]]);
        const text = (two ? step.name + ": " : "") + bytes(held) + ", " + step.words[kind[tensor]] + " of " +
          (step.words[module[tensor]] || "no sub-module") + ": " + tensorInWords(step, tensor).join(" ");
        hits.append(element("li", {}, button(text, function () {
          view.chosen = [side, tensor];
          parts.forEach(function (_, at) { view.open.add("/" + parts.slice(0, at + 1).join("/")); });
          go(side, highest(step.totals, born[tensor], dies[tensor]));
          table.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
        })));
      }
      const left = found.length - Math.min(found.length, HITS);
      hits.append(element("li", { class: "soft" }, found.length ? found.length + " found" + (left ? ", the largest are shown" : "") : "nothing found"));
    }

    function amounts(node) { return two ? [...node.bytes, node.bytes[1] - node.bytes[0]] : [node.bytes[0]]; }

    function opened(node) {  // a node, and what it holds alone
      view.open.add(node.path);
      while (node.inside.size === 1) {
        [node] = node.inside.values();
        view.open.add(node.path);
      }
    }

    function leafWords(node) {
      const side = two && node.leaf[1] !== undefined ? 1 : Number(Object.keys(node.leaf)[0]);
      const tensor = node.leaf[side];
      if (tensor === null) { return [element("span", {}, node.name)]; }
      const step = steps[side];
      const [name, more] = tensorInWords(step, tensor);
      const chosen = view.chosen && view.chosen[0] === side && view.chosen[1] === tensor;
      const made = [button(name, function () {
        view.chosen = chosen ? null : [side, tensor];
        render();
      }, { "aria-pressed": String(Boolean(chosen)), "data-key": node.path }), " ", element("span", { class: "soft" }, more)];
      if (chosen) {
        made.push(button("birth", function () { go(side, step.lives.born[tensor]); }, { "data-key": "birth" }),
          button("death", function () { go(side, step.lives.dies[tensor]); }, { "data-key": "death" }));
      }
      return made;
    }

    function rowsOf(node, depth, rows) {
      const by = Math.min(view.sort, amounts(node).length - 1);
      const children = [...node.inside.values()].sort(function (one, other) {
        return Math.abs(amounts(other)[by]) - Math.abs(amounts(one)[by]) || other.bytes[0] - one.bytes[0] || order(one.name, other.name);
      });
      const limit = view.more.get(node.path) ?? ROWS;
      for (const child of children.slice(0, limit)) {
        const isOpen = view.open.has(child.path);
        const kind = child.name.startsWith(":") ? child.name.slice(1) : "";
        const row = element("tr", {});
        const cell = element("td", { class: "w", style: "--depth:" + depth });
        if (child.leaf) {
          cell.append(...leafWords(child));
          row.className = cell.querySelector("[aria-pressed=true]") ? "leaf chosen" : "leaf";
        } else {
          const at = kind === "scratch" ? SCRATCH : PLACE[kind] ?? OTHER;
          cell.append(button(kind || child.name, function () {
            if (isOpen) { view.open.delete(child.path); } else { opened(child); }
            render();
          }, { "aria-expanded": String(isOpen), "data-key": child.path, class: kind ? "key k" + at : "" }));
        }
        row.append(cell, ...amounts(child).map(function (held, each) {
          return element("td", { class: "n" }, each === 2 ? change(held) : held ? bytes(held) : "-");
        }));
        rows.push(row);
        if (isOpen && !child.leaf) { rowsOf(child, depth + 1, rows); }
      }
      if (children.length > limit) {
        const cell = element("td", { class: "w", colspan: 4 }, button((children.length - limit) + " more", function () {
          view.more.set(node.path, limit + ROWS);
          render();
        }, { "data-key": "more " + node.path }));
        rows.push(element("tr", {}, cell));
      }
    }

    function render() {
      const focused = place.contains(document.activeElement) && document.activeElement.dataset.key;  // it is made anew
      charts.forEach(function (chart, side) {
        const [step, at] = [steps[side], view.at[side]];
        const x = WIDTH * (began(step, at) + step.lives.ends[at]) / 2 / axis.time;
        chart.cross.setAttribute("x1", x);
        chart.cross.setAttribute("x2", x);
        const words = time(began(step, at)) + ": " + bytes(step.totals[at]) + " during " + callInWords(step, at);
        chart.moment.textContent = words;
        chart.svg.setAttribute("aria-valuenow", at);
        chart.svg.setAttribute("aria-valuetext", words);
        const chosen = view.chosen && view.chosen[0] === side ? view.chosen[1] : null;
        chart.life.setAttribute("visibility", chosen === null ? "hidden" : "visible");
        if (chosen !== null) {
          const from = WIDTH * began(step, step.lives.born[chosen]) / axis.time;
          chart.life.setAttribute("x", from);
          chart.life.setAttribute("width", Math.max(3, WIDTH * step.lives.ends[step.lives.dies[chosen]] / axis.time - from));
        }
      });
      keys.replaceChildren(...KINDS.flatMap(function (kind, at) {
        if (!steps.some(function (step) { return step.levels[at].some(Boolean); })) { return []; }
        const held = steps.map(function (step, side) { return bytes(step.levels[at][view.at[side]]); });
        return [button(kind + " " + held.join(" \u2192 "), function () {
          view.kind = view.kind === at ? null : at;
          listHits();
          render();
        }, { class: "key k" + at, "data-key": kind, "aria-pressed": String(view.kind === at) })];
      }));
      const tree = treeOf(view);
      if (!view.open.size || view.terms.length) { opened(tree); }
      const rows = [];
      rowsOf(tree, 0, rows);
      const heads = two ? [...steps.map(function (step) { return step.name; }), "difference"] : ["bytes"];
      const head = element("tr", {}, element("th", { class: "w", scope: "col" }, "alive, by module and kind"), ...heads.map(
        function (name, at) {
          const sort = view.sort === at;
          return element("th", { class: "n", scope: "col", "aria-sort": sort ? "descending" : "none" },
            two ? button(name + (sort ? " \u2193" : ""), function () { view.sort = at; render(); }, { "data-key": "by " + name }) : name);
        }));
      const sums = element("tr", { class: "sum" }, element("td", { class: "w" }, view.terms.length || view.kind !== null ? "shown" : "all"),
        ...amounts(tree).map(function (held, at) { return element("td", { class: "n" }, at === 2 ? change(held) : bytes(held)); }));
      table.replaceChildren(element("thead", {}, head), element("tbody", {}, sums, ...rows));
      if (focused) { place.querySelector("[data-key='" + CSS.escape(focused) + "']")?.focus({ preventScroll: true }); }
    }
    status.textContent = two ? "Both steps are shown at the same operator." : "";
    render();
  }

  for (const place of document.querySelectorAll(".viewer")) { show(place, data.views[Number(place.dataset.view)]); }

  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", function () {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  const only = document.getElementById("only-red");
  if (only) {
    only.hidden = false;
    only.addEventListener("click", function () {
      const on = document.querySelector("main").classList.toggle("only-red");
      only.setAttribute("aria-pressed", String(on));
    });
  }
}());
