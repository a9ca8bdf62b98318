// Draws a recorded run, one frame at a time. Everything it needs stands in this page; it loads and sends nothing.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 1120, PAD = 12, CELL_W = 118, CELL_H = 74, GAP = 8, LABEL_W = 96;
  const COLUMNS = Math.floor((WIDTH - LABEL_W - PAD + GAP) / (CELL_W + GAP));
  const LOGICAL_W = 84, LOGICAL_H = 46, ROW_GAP = 16, COLOURS = 8;
  const LANE_H = 24, EXTENT = 15, EXTENT_GAP = 2, GROUP_HEAD = 24; // of groups of layers
  const MOST_EXTENTS = 512;
  const MOST_DRAWN = 64; // a larger tier shows its owned blocks only, and of those at most
  const MOST_SHOWN = 512;
  const MOST_SLOTS = 16; // a larger block shows this many parts
  const PLAY_MS = 1600;

  const byId = (id) => document.getElementById(id);
  const { recording, pictures, start, labels } = JSON.parse(byId("recording").textContent);
  const frames = recording.frames;
  const groups = recording.groups ?? []; // of layers; none: all layers see everything, and every block is group 0's
  const names = [...new Set(frames.flatMap((frame) => frame.sequences.map((sequence) => sequence.name)))];
  const colour = new Map(names.map((name, i) => [name, `s${i % COLOURS}`]));
  const between = Object.values(recording.texts).some((text) => text !== text.trim()) ? "" : " "; // pieces bring their own
  const words = (tokens) => tokens.map((token) => recording.texts[token] ?? String(token)).join(between);
  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const cut = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

  let current = 0;
  let timer = 0;

  const add = (parent, kind, attributes = {}, text = undefined) => {
    const element = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };

  // the slots of a block as a bar: x, y of its left end, its width; how many are filled
  const slots = (parent, x, y, width, filled) => {
    const parts = Math.min(recording.block_size, MOST_SLOTS);
    const full = Math.ceil((filled * parts) / recording.block_size);
    const each = width / parts;
    for (let i = 0; i < parts; i++) {
      const kind = i < full ? "slot filled" : "slot";
      add(parent, "rect", { class: kind, x: x + i * each + 0.5, y, width: Math.max(each - 1, 0.5), height: 8, rx: 1 });
    }
  };

  // a sequence's logical blocks, and under each its block table entry; where each entry ends, for the wires
  const drawSequence = (root, sequence, frame, y, wires) => {
    const mine = colour.get(sequence.name);
    const group = add(root, "g", { class: `sequence ${mine}`, "data-sequence": sequence.name });
    const origin = sequence.parent ? `fork of ${sequence.parent}` : "";
    add(group, "text", { x: PAD, y: y + 15, class: "mine" }, sequence.name);
    add(group, "text", { x: PAD, y: y + 30, class: "faint words" }, `${sequence.computed} of ${sequence.tokens.length}`);
    add(group, "text", { x: PAD, y: y + 43, class: "faint words" }, origin);
    const columns = Math.floor((WIDTH - LABEL_W - PAD) / (LOGICAL_W + 4));
    const lanes = sequence.tables ?? [];
    const rowHeight = LOGICAL_H + lanes.length * LANE_H + ROW_GAP;
    const held = new Map(frame.tiers.device.map((block) => [block.block, block]));
    sequence.blocks.forEach((block, i) => {
      const x = LABEL_W + (i % columns) * (LOGICAL_W + 4);
      const top = y + Math.floor(i / columns) * rowHeight;
      const filled = Math.min(Math.max(sequence.computed - i * recording.block_size, 0), recording.block_size);
      const shared = (held.get(block)?.sequences.length ?? 0) > 1;
      const cell = add(group, "g", {
        class: `cell logical held${shared ? " shared" : ""}`, "data-logical": i, "data-block": block,
      });
      const inside = sequence.tokens.slice(i * recording.block_size, (i + 1) * recording.block_size);
      add(cell, "title", {}, `${sequence.name}: logical block ${i} is device block ${block}. ${words(inside)}`);
      add(cell, "rect", { class: "frame", x, y: top, width: LOGICAL_W, height: 24, rx: 3 });
      add(cell, "text", { x: x + 6, y: top + 16, class: "faint" }, String(i));
      slots(cell, x + 24, top + 8, LOGICAL_W - 30, filled);
      add(cell, "rect", { class: "table", x, y: top + 24, width: LOGICAL_W, height: 20, rx: 3 });
      add(cell, "text", { x: x + LOGICAL_W / 2, y: top + 38, class: "mine", "text-anchor": "middle" }, String(block));
      wires.push({ mine, block, group: 0, x: x + LOGICAL_W / 2, y: top + 44 });
    });
    const rows = Math.max(1, Math.ceil(sequence.blocks.length / columns));
    lanes.forEach((table, lane) => drawLane(group, sequence, frame, lane + 1, table, y, columns, rowHeight, rows, wires));
    return y + rows * rowHeight;
  };

  // a sequence's table in a short group, under the logical blocks that its pages are of: where it has a hole, nothing
  const drawLane = (parent, sequence, frame, number, table, y, columns, rowHeight, rows, wires) => {
    const mine = colour.get(sequence.name);
    const held = pagesOf(frame, "device", number);
    const under = LOGICAL_H + (number - 1) * LANE_H;
    for (let row = 0; row < rows; row++) {
      add(parent, "text", { x: PAD, y: y + row * rowHeight + under + 15, class: "faint words" }, `group ${number}`);
    }
    table.pages.forEach((page, j) => {
      const i = table.first + j;
      const x = LABEL_W + (i % columns) * (LOGICAL_W + 4);
      const top = y + Math.floor(i / columns) * rowHeight + under;
      const shared = (held.get(page)?.sequences.length ?? 0) > 1;
      const cell = add(parent, "g", {
        class: `cell paged held${shared ? " shared" : ""}`, "data-group": number, "data-logical": i, "data-page": page,
      });
      add(cell, "title", {}, `${sequence.name}: of logical block ${i}, group ${number} has device page ${page}.`);
      add(cell, "rect", { class: "frame table", x, y: top, width: LOGICAL_W, height: 20, rx: 3 });
      add(cell, "text", { x: x + LOGICAL_W / 2, y: top + 14, class: "mine", "text-anchor": "middle" }, String(page));
      wires.push({ mine, block: page, group: number, x: x + LOGICAL_W / 2, y: top + 20 });
    });
  };

  const pagesOf = (frame, tier, group) =>
    new Map(frame.pages[tier].filter((page) => page.group === group).map((page) => [page.page, page]));

  // one physical block, or a page of group 1 or more; `ends`: points that stand behind it
  const drawBlock = (root, tier, group, id, block, x, y, copyOf, ends) => {
    const kinds = ["cell", group ? "page" : "block", block ? "held" : "free"];
    if (block && block.sequences.length > 1) kinds.push("shared");
    if (block && block.moving) kinds.push("moving");
    if (copyOf !== undefined) kinds.push("copied");
    const cell = add(root, "g", { class: kinds.join(" "), "data-tier": tier, [group ? "data-page" : "data-block"]: id });
    if (groups.length) cell.setAttribute("data-group", group);
    add(cell, "rect", { class: "frame", x, y, width: CELL_W, height: CELL_H, rx: 5 });
    add(cell, "text", { x: x + 8, y: y + 18, class: block ? "strong" : "faint" }, String(id));
    if (!block) {
      add(cell, "text", { x: x + CELL_W / 2, y: y + 42, class: "faint", "text-anchor": "middle" }, "free");
      return;
    }
    cell.setAttribute("data-references", block.references);
    cell.setAttribute("data-owners", [...(block.in_tree ? ["tree"] : []), ...block.sequences].join(" "));
    cell.setAttribute("data-filled", block.tokens.length);
    const text = words(block.tokens);
    const said = copyOf === undefined ? "" : ` Copied on write from block ${copyOf}.`;
    const moving = { in: " Arriving.", out: " Leaving." }[block.moving] ?? "";
    const name = group ? `page ${id} of group ${group}` : `block ${id}`;
    const points = group ? block.points : ends;
    const stand = !points ? "" : group ? ` Kept for ${count(points, "point")}.` : ` Behind it: ${count(points, "point")}.`;
    add(cell, "title", {}, `${tier} ${name}, ${block.references} references.${stand}${said}${moving} ${text}`);
    if (group) {
      cell.setAttribute("data-logical", block.logical);
      const of = block.logical < 0 ? "" : `block ${block.logical}`;
      add(cell, "text", { x: x + CELL_W / 2 - 4, y: y + 18, class: "faint words", "text-anchor": "middle" }, of);
    }
    add(cell, "text", { x: x + CELL_W - 8, y: y + 18, class: "faint words", "text-anchor": "end" }, `refs ${block.references}`);
    slots(cell, x + 8, y + 26, CELL_W - 16, block.tokens.length);
    add(cell, "text", { x: x + 8, y: y + 48, class: "words" }, cut(text, 18));
    let at = x + 8;
    if (block.in_tree) {
      add(cell, "circle", { class: "badge tree", cx: at + 7, cy: y + 61, r: 7 });
      add(cell, "text", { x: at + 7, y: y + 65, class: "tree words strong", "text-anchor": "middle" }, "T");
      at += 19;
    }
    if (points) {
      cell.setAttribute("data-points", points);
      add(cell, "rect", { class: "badge point", x: at, y: y + 54, width: points > 1 ? 22 : 14, height: 14, rx: 3 });
      const inside = { x: at + (points > 1 ? 11 : 7), y: y + 65, class: "point words strong", "text-anchor": "middle" };
      add(cell, "text", inside, points > 1 ? `P${points}` : "P");
      at += points > 1 ? 27 : 19;
    }
    const room = block.moving && points ? 1 : points ? 3 : 4;
    for (const name of block.sequences.slice(0, room)) {
      const badge = add(cell, "g", { class: colour.get(name) });
      add(badge, "rect", { class: "badge mine", x: at, y: y + 54, width: 16, height: 14, rx: 3 });
      add(badge, "text", { x: at + 8, y: y + 65, class: "mine words", "text-anchor": "middle" }, name);
      at += 19;
    }
    const owning = group ? block.points + block.moves : (block.in_tree ? 1 : 0) + (block.moving ? 1 : 0);
    const counted = owning + block.sequences.length;
    const rest = Math.max(block.sequences.length - room, 0) + (block.references - counted);
    if (rest > 0) add(cell, "text", { x: at, y: y + 65, class: "faint words" }, `+${rest}`);
    if (block.moving) {
      const word = block.moving === "in" ? "arriving" : "leaving";
      add(cell, "text", { x: x + CELL_W - 8, y: y + 65, class: "faint words", "text-anchor": "end" }, word);
    }
  };

  // cells in rows from y on; where each stands, and the end of the last row
  const drawCells = (parent, tier, group, ids, held, copies, ends, y, places) => {
    ids.forEach((id, i) => {
      const x = LABEL_W + (i % COLUMNS) * (CELL_W + GAP);
      const top = y + Math.floor(i / COLUMNS) * (CELL_H + GAP);
      places.set(`${tier} ${group} ${id}`, { x, y: top });
      drawBlock(parent, tier, group, id, held.get(id), x, top, held.has(id) ? copies.get(id) : undefined, ends.get(id) ?? 0);
    });
    return y + Math.ceil(ids.length / COLUMNS) * (CELL_H + GAP);
  };

  const copiesOf = (frame, tier, group) => {
    if (tier !== "device") return new Map();
    if (!group) return new Map(frame.copies.map(([source, target]) => [target, source]));
    return new Map(frame.page_copies.filter(([of]) => of === group).map(([, source, target]) => [target, source]));
  };

  // a tier: its label and its blocks; where each block stands
  const drawTier = (root, tier, size, frame, y, places) => {
    const held = new Map(frame.tiers[tier].map((block) => [block.block, block]));
    const ids = size <= MOST_DRAWN ? [...Array(size).keys()] : [...held.keys()].slice(0, MOST_SHOWN);
    const group = add(root, "g", { class: "tier", "data-tier": tier, "data-held": held.size });
    add(group, "text", { x: PAD, y: y + 18, class: "strong" }, tier);
    add(group, "text", { x: PAD, y: y + 36, class: "faint words" }, `${held.size} of ${size}`);
    add(group, "text", { x: PAD, y: y + 50, class: "faint words" }, ids.length < held.size ? `${ids.length} drawn` : "owned");
    const end = drawCells(group, tier, 0, ids, held, copiesOf(frame, tier, 0), new Map(), y, places);
    return Math.max(end, y + CELL_H + GAP);
  };

  // a tier in extents: who has each, and a lane for each group, of the blocks or pages in its extents
  const drawTierByGroup = (root, tier, frame, y, places) => {
    const owners = frame.extents[tier];
    const used = owners.filter((owner) => owner >= 0).length;
    const parent = add(root, "g", { class: "tier", "data-tier": tier, "data-held": used });
    add(parent, "text", { x: PAD, y: y + 14, class: "strong" }, tier);
    add(parent, "text", { x: PAD, y: y + 30, class: "faint words" }, `${used} of ${owners.length}`);
    add(parent, "text", { x: PAD, y: y + 43, class: "faint words" }, "extents used");
    const columns = Math.floor((WIDTH - LABEL_W - PAD) / (EXTENT + EXTENT_GAP));
    const drawn = owners.slice(0, MOST_EXTENTS);
    drawn.forEach((owner, i) => {
      const x = LABEL_W + (i % columns) * (EXTENT + EXTENT_GAP);
      const top = y + 2 + Math.floor(i / columns) * (EXTENT + EXTENT_GAP);
      const cell = add(parent, "g", { class: `extent ${owner < 0 ? "free" : `g${owner}`}`, "data-owner": owner });
      add(cell, "title", {}, `${tier} extent ${i}: ${owner < 0 ? "free" : labels[owner]}`);
      add(cell, "rect", { x, y: top, width: EXTENT, height: EXTENT, rx: 2 });
      if (owner >= 0) add(cell, "text", { x: x + EXTENT / 2, y: top + 11.5, "text-anchor": "middle" }, String(owner));
    });
    let end = y + 6 + Math.ceil(drawn.length / columns) * (EXTENT + EXTENT_GAP);
    if (!used) return Math.max(end, y + 48);
    labels.forEach((label, number) => {
      const held = number ? pagesOf(frame, tier, number) : new Map(frame.tiers[tier].map((block) => [block.block, block]));
      const each = recording.per_extent[tier][number];
      const own = owners.flatMap((owner, i) => (owner === number ? [...Array(each).keys()].map((j) => i * each + j) : []));
      const ids = own.length <= MOST_DRAWN ? own : [...held.keys()].slice(0, MOST_SHOWN);
      const ends = new Map();
      for (const point of number ? [] : frame.points) {
        if (point.tier === tier) ends.set(point.block, (ends.get(point.block) ?? 0) + 1);
      }
      const lane = add(parent, "g", { class: "lane", "data-group": number, "data-held": held.size });
      const told = ids.length < held.size ? `${ids.length} of ${held.size} drawn` : count(held.size, number ? "page" : "block");
      add(lane, "rect", { class: `mark g${number}`, x: LABEL_W, y: end + 6, width: 10, height: 10, rx: 2 });
      add(lane, "text", { x: LABEL_W + 16, y: end + 15, class: "faint over" }, `${label}: ${told}`);
      end = drawCells(lane, tier, number, ids, held, copiesOf(frame, tier, number), ends, end + GROUP_HEAD, places);
    });
    return Math.max(end, y + 48);
  };

  const arrow = (root, kind, from, to, sideways) => {
    const half = CELL_W / 2;
    const down = to.y > from.y;
    const a = sideways ? { x: from.x + half, y: from.y } : { x: from.x + half, y: from.y + (down ? CELL_H : 0) };
    const b = sideways ? { x: to.x + half, y: to.y } : { x: to.x + half, y: to.y + (down ? 0 : CELL_H) };
    const lift = sideways ? -34 : 0;
    const path = sideways
      ? `M${a.x} ${a.y} C${a.x} ${a.y + lift} ${b.x} ${b.y + lift} ${b.x} ${b.y - 7}`
      : `M${a.x} ${a.y} L${b.x} ${b.y + (down ? -7 : 7)}`;
    add(root, "path", { class: `arrow ${kind}`, d: path });
    const tip = sideways || down ? 1 : -1;
    const points = `${b.x},${b.y} ${b.x - 6},${b.y - 9 * tip} ${b.x + 6},${b.y - 9 * tip}`;
    add(root, "polygon", { class: `head ${kind}`, points });
  };

  // a copy whose source is drawn no more: an arrow out of nowhere, and the source's number
  const comeFrom = (root, source, to) => {
    const x = to.x + CELL_W - 14;
    add(root, "path", { class: "arrow copy", d: `M${x} ${to.y - 20} L${x} ${to.y - 7}` });
    add(root, "polygon", { class: "head copy", points: `${x},${to.y} ${x - 6},${to.y - 9} ${x + 6},${to.y - 9}` });
    const text = { x: to.x + CELL_W - 8, y: to.y + 65, class: "faint words source", "text-anchor": "end" };
    add(root, "text", text, `copy of ${source}`);
  };

  const draw = (frame) => {
    const svg = byId("picture");
    const root = document.createElementNS(SVG, "g");
    const wires = [];
    const places = new Map();
    let y = PAD;
    if (!frame.sequences.length) {
      add(root, "text", { x: PAD, y: y + 15, class: "faint" }, "no sequences");
      y += 30;
    }
    for (const sequence of frame.sequences) y = drawSequence(root, sequence, frame, y, wires);
    y += 34;
    const wiring = document.createElementNS(SVG, "g");
    for (const [tier, size] of Object.entries(recording.tiers)) {
      const end = groups.length ? drawTierByGroup(root, tier, frame, y, places) : drawTier(root, tier, size, frame, y, places);
      y = end + 22;
    }
    for (const wire of wires) {
      const place = places.get(`device ${wire.group} ${wire.block}`);
      if (!place) continue;
      const x = place.x + CELL_W / 2;
      const middle = (wire.y + place.y) / 2;
      const d = `M${wire.x} ${wire.y} C${wire.x} ${middle} ${x} ${middle} ${x} ${place.y}`;
      const kind = wire.group ? "wire short" : "wire";
      add(wiring, "path", { class: `${kind} ${wire.mine}`, d, [wire.group ? "data-page" : "data-block"]: wire.block });
    }
    const copies = [...frame.copies.map((pair) => [0, ...pair]), ...(frame.page_copies ?? [])];
    for (const [group, source, target] of copies) {
      const [from, to] = [places.get(`device ${group} ${source}`), places.get(`device ${group} ${target}`)];
      if (from && to) arrow(root, "copy", from, to, from.y === to.y);
      else if (to) comeFrom(root, source, to);
    }
    for (const move of frame.moves) {
      const group = move.group ?? 0;
      const from = places.get(`${move.source} ${group} ${move.block}`);
      const to = places.get(`${move.destination} ${group} ${move.to}`);
      const flying = group
        ? pagesOf(frame, move.destination, group).get(move.to)?.moving === "in"
        : frame.tiers[move.destination].some((block) => block.block === move.to && block.moving === "in");
      if (from && to && flying) arrow(root, "move", from, to, false);
    }
    root.prepend(wiring); // under the blocks
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${y}`);
    svg.replaceChildren(root);
  };

  const show = (index) => {
    current = Math.min(Math.max(index, 0), frames.length - 1);
    const frame = frames[current];
    byId("caption").textContent = frame.caption;
    byId("counter").textContent = `step ${current + 1} of ${frames.length}`;
    byId("slider").value = String(current + 1);
    byId("slider").setAttribute("aria-valuetext", `step ${current + 1}: ${frame.caption}`);
    byId("text").textContent = pictures[current];
    byId("first").disabled = byId("back").disabled = current === 0;
    byId("next").disabled = byId("last").disabled = current === frames.length - 1;
    for (const button of byId("steps").querySelectorAll("button")) {
      if (Number(button.dataset.step) === current) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    }
    document.documentElement.dataset.step = String(current + 1);
    draw(frame);
  };

  const pause = () => {
    clearInterval(timer);
    timer = 0;
    byId("play").textContent = "Play";
    byId("play").setAttribute("aria-pressed", "false");
  };

  const play = () => {
    if (timer) return pause();
    if (current === frames.length - 1) show(0);
    byId("play").textContent = "Pause";
    byId("play").setAttribute("aria-pressed", "true");
    timer = setInterval(() => {
      show(current + 1);
      if (current === frames.length - 1) pause();
    }, PLAY_MS);
    return undefined;
  };

  const go = (index) => {
    pause();
    show(index);
  };

  const themes = ["auto", "light", "dark"];
  const turnTheme = () => {
    const root = document.documentElement;
    const next = themes[(themes.indexOf(root.dataset.theme ?? "auto") + 1) % themes.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    byId("theme").textContent = `Theme: ${next}`;
  };

  const keys = {
    ArrowLeft: () => go(current - 1),
    ArrowRight: () => go(current + 1),
    Home: () => go(0),
    End: () => go(frames.length - 1),
    " ": play,
  };

  frames.forEach((frame, i) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.step = String(i);
    button.textContent = frame.caption;
    button.addEventListener("click", () => go(i));
    item.append(button);
    byId("steps").append(item);
  });
  for (const item of document.querySelectorAll("#legend [data-groups]")) item.hidden = !groups.length;
  byId("slider").max = String(frames.length);
  byId("slider").addEventListener("input", (event) => go(Number(event.target.value) - 1));
  byId("first").addEventListener("click", () => go(0));
  byId("back").addEventListener("click", () => go(current - 1));
  byId("next").addEventListener("click", () => go(current + 1));
  byId("last").addEventListener("click", () => go(frames.length - 1));
  byId("play").addEventListener("click", play);
  byId("theme").addEventListener("click", turnTheme);
  document.addEventListener("keydown", (event) => {
    const action = keys[event.key];
    const takesKeys = event.target.closest("input, button, summary");
    const itsOwn = takesKeys && (event.key === " " || takesKeys.tagName === "INPUT");
    if (!action || itsOwn || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    action();
  });
  show(start - 1);
})();
