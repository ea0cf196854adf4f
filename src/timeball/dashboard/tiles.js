// Large figures with a label and a note.

import { el, set, write } from './dom.js';

export class Tile {
  constructor(label) {
    this.value = el('p', { class: 'tile-value' }, '–');
    this.note = el('p', { class: 'tile-note' });
    this.node = el('div', { class: 'tile' }, el('h2', { class: 'tile-label' }, label), this.value, this.note);
  }

  /** Show a figure. `tone` colours it: good, warn, bad, or none. */
  show(value, note = '', tone = '') {
    write(this.value, value);
    write(this.note, note);
    set(this.node, 'data-tone', tone || false);
  }
}

export const tiles = (...all) => el('div', { class: 'tiles' }, ...all.map(tile => tile.node));
