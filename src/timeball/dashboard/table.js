// A table whose cells are updated in place. On a narrow screen each row is a card.

import { el, emptiness, keyed, show, write } from './dom.js';

export class DataTable {
  /**
   * A column is `{ label, kind }` with `value(row)`, which returns a text, or with `make(rowNow)`, which returns the
   * nodes of a new cell, and `update(cell, row)`. `rowNow()` returns the current row, because rows are updated.
   */
  constructor({ caption, columns, keyOf, empty }) {
    Object.assign(this, { columns, keyOf });
    // A table has these roles by itself, but a browser drops them where the style makes rows to cards.
    this.body = el('tbody', { role: 'rowgroup' });
    const heads = columns.map(({ label, kind, isUnseen }) => el('th', { role: 'columnheader', scope: 'col', class: kind || false },
      isUnseen ? el('span', { class: 'unseen' }, label) : label));
    this.table = el('table', { class: 'data', role: 'table' }, el('caption', { class: 'unseen' }, caption),
      el('thead', { role: 'rowgroup' }, el('tr', { role: 'row' }, ...heads)), this.body);
    this.empty = empty ?? emptiness('Nothing here', '');
    this.node = el('div', { class: 'table-frame' }, this.table, this.empty);
    this.show([]);
  }

  show(rows) {
    show(this.table, rows.length > 0);
    show(this.empty, rows.length === 0);
    keyed(this.body, rows, this.keyOf, row => this.make(row), (node, row) => this.update(node, row));
  }

  make(row) {
    const node = el('tr', { role: 'row' });
    node.row = row;
    for (const { label, kind, make } of this.columns) {
      const value = el('div', { class: 'value' }, ...(make ? [make(() => node.row)].flat() : []));
      node.append(el('td', { role: 'cell', class: kind || false, 'data-label': label }, value));
    }
    return node;
  }

  update(node, row) {
    node.row = row;
    this.columns.forEach(({ value, update }, at) => {
      const shown = node.cells[at].firstChild;
      if (value) write(shown, value(row));
      update?.(shown, row);
    });
  }

  /** Update all rows, for texts that change with the time. */
  refresh() {
    for (const node of this.body.rows) this.update(node, node.row);
  }
}
