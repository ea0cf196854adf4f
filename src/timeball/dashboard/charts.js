// Charts in SVG, as wide as their element. Their nodes are reused and moved, so that an update does not flicker.

import { el, set, svg, write } from './dom.js';
import { printable } from './format.js';

const LEFT = 56;
const RIGHT = 8;
const TOP = 12;
const BOTTOM = 24;

/** Return round numbers from 0 to at least `top`, in about four equal steps. */
export function ticks(top) {
  if (!(top > 0)) return [0, 1];
  const rough = top / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
  const numbers = [0];
  while (numbers.at(-1) < top) numbers.push(Math.round((numbers.at(-1) + step) / power) * power);
  return numbers;
}

/** A frame with axes. A subclass has `draw()`, which is called at each new width. */
class Chart {
  constructor(label, height) {
    this.height = height;
    this.width = 0;
    this.grid = svg('g', { class: 'grid' });
    this.marks = svg('g', { class: 'marks' });
    this.texts = svg('g', { class: 'axis' });
    this.picture = svg('svg', { role: 'img', 'aria-label': label, height }, this.grid, this.marks, this.texts);
    this.node = el('div', { class: 'chart' }, this.picture);
    this.watch = new ResizeObserver(([entry]) => this.resize(Math.floor(entry.contentRect.width)));
    this.watch.observe(this.node);
  }

  resize(width) {
    if (width === this.width || width <= 0) return;
    this.width = width;
    set(this.picture, 'width', width);
    set(this.picture, 'viewBox', `0 0 ${width} ${this.height}`);
    this.draw();
  }

  close() {
    this.watch.disconnect();
  }

  describe(text) {
    set(this.picture, 'aria-label', text);
  }

  get innerWidth() {
    return this.width - LEFT - RIGHT;
  }

  /** Return the coordinate of a part of the width, from 0 at the left to 1. */
  x(part) {
    return LEFT + part * this.innerWidth;
  }

  /** Return the coordinate of a part of the height, from 0 at the bottom to 1. */
  y(part) {
    return TOP + (1 - part) * (this.height - TOP - BOTTOM);
  }

  /** Draw the axes: `ys` and `xs` are lists of [part from 0 to 1, label]. */
  axes(ys, xs) {
    const lines = pooled(this.grid, 'line', ys.length);
    ys.forEach(([part], at) => {
      const y = Math.round(this.y(part)) + 0.5;
      place(lines[at], { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
    });
    const texts = pooled(this.texts, 'text', ys.length + xs.length);
    ys.forEach(([part, label], at) => {
      place(texts[at], { x: LEFT - 8, y: this.y(part) + 4, 'text-anchor': 'end' });
      write(texts[at], label);
    });
    xs.forEach(([part, label], at) => {
      const anchor = part < 0.04 ? 'start' : part > 0.96 ? 'end' : 'middle'; // so that a label at a side is not cut
      const text = texts[ys.length + at];
      place(text, { x: this.x(part), y: this.height - 6, 'text-anchor': anchor });
      write(text, label);
    });
  }
}

/** Return the children of a group, exactly `n` of them: elements are appended or removed. */
function pooled(group, tag, n) {
  while (group.childNodes.length > n) group.lastChild.remove();
  while (group.childNodes.length < n) group.append(svg(tag));
  return group.childNodes;
}

/** Set attributes of a node, numbers with two decimals. */
function place(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    set(node, name, typeof value === 'number' ? Math.round(value * 100) / 100 : value);
  }
}

/**
 * Lines over time. A line is `{ name, points, isStepped, isFilled }`. A point is a part of the width and one of the
 * height, or null for the height where the line has a gap.
 */
export class LineChart extends Chart {
  constructor(label, height = 200) {
    super(label, height);
    this.value = { lines: [], ys: [], xs: [] };
  }

  show(value) {
    this.value = value;
    if (this.width) this.draw();
  }

  draw() {
    const { lines, ys, xs } = this.value;
    this.axes(ys, xs);
    const paths = pooled(this.marks, 'path', lines.length);
    lines.forEach(({ name, points, isStepped, isFilled }, at) => {
      set(paths[at], 'class', `line ${name}${isFilled ? ' filled' : ''}`);
      set(paths[at], 'd', this.path(points, isStepped, isFilled));
    });
  }

  /** Return the path of a line. */
  path(points, isStepped, isFilled) {
    let path = '';
    let first = null;
    let last = null;
    const end = () => {
      if (isFilled && first !== null) path += `V${this.y(0)}H${first}Z`;
      first = null;
    };
    for (const [across, up] of points) {
      const x = this.x(across).toFixed(1);
      if (up === null) {
        end();
        last = null;
        continue;
      }
      const y = this.y(up).toFixed(1);
      path += last === null ? `M${x} ${y}` : isStepped ? `H${x}V${y}` : `L${x} ${y}`;
      first ??= x;
      last = y;
    }
    end();
    return path || 'M0 0';
  }
}

/**
 * Bars side by side. A user points at a bar by mouse, touch or arrow keys, and chooses it by a click or Enter.
 *
 * `onPoint(at)` gets the index of a bar, or -1 for none, and `onChoose(at)` the index of the chosen bar.
 */
export class BarChart extends Chart {
  constructor(label, { height = 240, onPoint, onChoose }) {
    super(label, height);
    this.value = { values: [], top: 1, ys: [], xs: [], level: null };
    this.at = -1;
    this.cursor = svg('rect', { class: 'cursor', visibility: 'hidden' });
    this.level = svg('line', { class: 'level', visibility: 'hidden' });
    this.picture.insertBefore(this.cursor, this.marks);
    this.picture.append(this.level);
    Object.assign(this, { onPoint, onChoose });
    this.node.tabIndex = 0;
    set(this.node, 'role', 'group');
    set(this.node, 'aria-label', label);
    this.node.addEventListener('pointermove', event => this.point(this.under(event)));
    this.node.addEventListener('pointerleave', () => this.point(-1));
    this.node.addEventListener('click', event => this.choose(this.under(event)));
    this.node.addEventListener('keydown', event => this.key(event));
  }

  show(value) {
    this.value = value;
    if (this.at >= value.values.length) this.at = -1;
    if (this.width) this.draw();
  }

  draw() {
    const { values, top, ys, xs, level } = this.value;
    this.axes(ys, xs);
    const width = this.innerWidth / Math.max(1, values.length);
    const gap = width > 6 ? 2 : width > 3 ? 1 : 0;
    const bars = pooled(this.marks, 'rect', values.length);
    values.forEach((n, at) => {
      // A bar of one message beside a bar of a million is still visible as a line.
      const height = n > 0 ? Math.max(1.5, this.y(0) - this.y(n / top)) : 0;
      place(bars[at], { x: LEFT + at * width + gap / 2, width: Math.max(0.5, width - gap), y: this.y(0) - height, height });
    });
    const isLevel = level !== null && level <= top;
    set(this.level, 'visibility', isLevel ? 'visible' : 'hidden');
    if (isLevel) place(this.level, { x1: LEFT, x2: this.width - RIGHT, y1: this.y(level / top), y2: this.y(level / top) });
    this.point(this.at);
  }

  /** Return the index of the bar under the pointer, -1 beside the bars. */
  under(event) {
    const across = (event.clientX - this.node.getBoundingClientRect().left - LEFT) / this.innerWidth;
    const at = Math.floor(across * this.value.values.length);
    return across >= 0 && at < this.value.values.length ? at : -1;
  }

  point(at) {
    this.at = at;
    set(this.cursor, 'visibility', at < 0 ? 'hidden' : 'visible');
    if (at >= 0) {
      const width = this.innerWidth / this.value.values.length;
      place(this.cursor, { x: LEFT + at * width, width: Math.max(2, width), y: TOP, height: this.y(0) - TOP });
    }
    this.onPoint(at);
  }

  choose(at) {
    if (at >= 0) this.onChoose(at);
  }

  key(event) {
    const last = this.value.values.length - 1;
    const to = { ArrowRight: this.at + 1, ArrowLeft: this.at < 0 ? last : this.at - 1, Home: 0, End: last,
      PageUp: this.at - 10, PageDown: this.at + 10 }[event.key];
    if (to !== undefined) this.point(Math.max(0, Math.min(last, to)));
    else if (event.key === 'Enter' && this.at >= 0) this.choose(this.at);
    else if (event.key === 'Escape' && this.at >= 0) this.point(-1);
    else return;
    event.preventDefault();
  }
}

/** Rows `{ label, n }` with a bar each. `noteOf(row)` returns the text after the bar. */
export class BarList {
  constructor(caption) {
    this.body = el('tbody');
    this.node = el('table', { class: 'bar-list' }, el('caption', {}, caption), this.body);
  }

  show(rows, noteOf) {
    const top = Math.max(1, ...rows.map(row => row.n));
    while (this.body.rows.length > rows.length) this.body.lastChild.remove();
    while (this.body.rows.length < rows.length) {
      this.body.append(el('tr', {}, el('th', { scope: 'row' }), el('td', { class: 'bar-cell' }, el('div', { class: 'bar-fill' })),
        el('td', { class: 'number' })));
    }
    rows.forEach((row, at) => {
      const [label, cell, note] = this.body.rows[at].cells;
      write(label, printable(row.label, 80));
      cell.firstChild.style.inlineSize = `${(100 * row.n) / top}%`;
      write(note, noteOf(row));
    });
  }
}
