// Dead letters of a group: to read, to send again, and to delete.

import { ask, get, getAll } from '../api.js';
import { broker } from '../broker.js';
import { confirm, facts, field, select, showDialog } from '../dialogs.js';
import { button, el, emptiness, show, write } from '../dom.js';
import { count, distance, instant, printable } from '../format.js';
import { about, bdi, bodyView, propertiesView } from '../messages.js';
import { Loading } from '../loading.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { DataTable } from '../table.js';

const EVERY_MS = 5_000;
const ROWS = 50;
const PREVIEW = 120;

export const deadLetters = {
  id: 'dead-letters',
  title: 'Dead letters',
  open: (root, parameters) => new DeadLetters(root, parameters),
};

class DeadLetters {
  constructor(root, parameters) {
    this.chosen = new Set();
    this.rows = [];
    this.pages = [''];
    this.group = select([], '', { id: 'group', onchange: () => this.go(this.group.value) });
    this.resend = button('Send again', () => this.change('resend'), 'primary');
    this.remove = button('Delete', () => this.change('delete'));
    this.all = button('All of this group …', () => this.changeAll());
    this.summary = el('p', { class: 'hint', role: 'status' });
    this.back = button('‹ Previous', () => this.turn(-1));
    this.next = button('Next ›', () => this.turn(1));
    this.refused = refusal();
    this.table = new DataTable({
      caption: 'Dead letters', keyOf: row => row.dead_letter, columns: this.columns(),
      empty: emptiness('No dead letters.', 'A message comes here when a group has given it back as often as its attempts allow.'),
    });
    this.bar = el('div', { class: 'toolbar admin' }, this.resend, this.remove, this.all);
    show(this.bar, false); // until the group of the page is known
    const card = el('section', { class: 'card' }, this.summary, this.bar, this.table.node, el('div', { class: 'actions' }, this.back, this.next));
    this.loading = new Loading(card);
    root.append(el('div', { class: 'toolbar' }, field('Group', this.group)), this.refused.node, this.loading.node, card);
    this.clock = setInterval(() => !document.hidden && this.table.refresh(), 1_000);
    this.follow(parameters);
  }

  close() {
    this.poll.stop();
    clearInterval(this.clock);
  }

  columns() {
    return [
      { label: 'Choose', isUnseen: true, kind: 'pick admin', make: row => this.box(row) },
      { label: 'Given up', make: () => [el('span', { class: 'when' }), el('span', { class: 'away' })], update: showDied },
      { label: 'Topic', kind: 'name', make: row => bdi(row().topic ?? '', 80) },
      { label: 'Keys', kind: 'name', make: row => bdi([row().keys ?? ''].flat().join(' '), 60) },
      { label: 'Attempts', kind: 'number', value: row => count(row.attempts ?? NaN) },
      { label: 'Reason', make: row => bdi(row().reason ?? '–', 200) },
      { label: 'Body', make: row => button(preview(row()), () => this.look(row()), 'link mono') },
    ];
  }

  box(row) {
    const input = el('input', { type: 'checkbox', 'aria-label': `Choose ${printable(row().id ?? row().dead_letter, 40)}`, onchange: () => {
      this.chosen[input.checked ? 'add' : 'delete'](row().dead_letter);
      this.showChosen();
    } });
    return input;
  }

  /** Open the page of another group. */
  go(group) {
    location.hash = `#/dead-letters?${new URLSearchParams({ group })}`;
  }

  follow(parameters) {
    this.asked = parameters.get('group') ?? '';
    this.pages = [''];
    this.chosen.clear();
    this.poll?.stop();
    this.loading.begin(); // so that the letters of another group are not shown for this one
    this.poll = new Poll({ everyMs: EVERY_MS, read: signal => this.read(signal), show: found => this.show(found),
      fail: error => this.refused.show(error), loading: this.loading }).start();
  }

  async read(signal) {
    const groups = await getAll(['v1', 'groups'], 'groups', signal);
    // If the address names no group, the page shows the one with the most dead letters.
    const [most] = [...groups].sort((a, b) => b.dead_letters - a.dead_letters);
    const name = this.asked || most?.group;
    const page = name ? await get(['v1', 'groups', name, 'dead-letters'], { max: ROWS, page: this.pages.at(-1) }, signal) : { dead_letters: [] };
    return { groups, name, ...page };
  }

  show({ groups, name, dead_letters: rows, next_page: nextPage }) {
    this.refused.show(null);
    Object.assign(this, { name, nextPage, rows });
    const options = new Map(groups.map(each => [each.group, `${printable(each.group, 60)} (${count(each.dead_letters)})`]));
    if (name && !options.has(name)) options.set(name, printable(name, 60));
    for (const option of [...this.group.options]) if (!options.has(option.value)) option.remove();
    for (const [value, label] of options) {
      const option = [...this.group.options].find(each => each.value === value) ?? this.group.appendChild(el('option', { value }));
      write(option, label);
    }
    if (name && document.activeElement !== this.group) this.group.value = name;
    const shown = new Set(rows.map(row => row.dead_letter));
    for (const each of this.chosen) if (!shown.has(each)) this.chosen.delete(each);
    this.table.show(rows);
    const place = this.pages.length > 1 ? `, page ${this.pages.length}` : '';
    write(this.summary, name ? `${count(rows.length)}${nextPage ? ' and more' : ''} of ${printable(name, 60)}${place}.` : '');
    show(this.summary, rows.length > 0);
    show(this.bar, rows.length > 0);
    show(this.back, this.pages.length > 1);
    show(this.next, Boolean(nextPage));
    this.showChosen();
  }

  showChosen() {
    const n = this.chosen.size;
    this.resend.disabled = this.remove.disabled = n === 0;
    write(this.resend, n ? `Send ${count(n)} again` : 'Send again');
    write(this.remove, n ? `Delete ${count(n)}` : 'Delete');
  }

  turn(by) {
    if (by > 0 && this.nextPage) this.pages.push(this.nextPage);
    else if (by < 0 && this.pages.length > 1) this.pages.pop();
    this.chosen.clear();
    for (const input of this.table.node.querySelectorAll('input:checked')) input.checked = false;
    this.poll.now();
  }

  change(verb) {
    const picked = [...this.chosen];
    this.ask(verb, { dead_letters: picked }, picked.length === 1 ? 'this dead letter' : `these ${count(picked.length)} dead letters`);
  }

  changeAll() {
    const verb = select([['resend', 'Send all of them again'], ['delete', 'Delete all of them']], 'resend');
    confirm({ title: 'What with all dead letters of this group?', about: [['Group', bdi(this.name)]], fields: [field('What to do', verb)],
      note: 'What is deleted cannot be had again.', label: 'Do it', isDangerous: true, done: () => this.done(),
      act: () => this.act(verb.value, { all: true }) });
  }

  /** Send letters again or delete them, after a confirmation. `what` names them in its text. */
  ask(verb, body, what) {
    const isResend = verb === 'resend';
    confirm({ title: isResend ? `Send ${what} again?` : `Delete ${what}?`, about: [['Group', bdi(this.name)]],
      note: isResend ? 'Each goes back to its topic, for this group, as a first attempt.' : 'What is deleted cannot be had again.',
      label: isResend ? 'Send again' : 'Delete', isDangerous: !isResend, done: () => this.done(), act: () => this.act(verb, body) });
  }

  /** Make the request, and return a verdict for `confirm`. Raises Problem. */
  async act(verb, body) {
    const { count: done, results } = await ask('POST', ['v1', 'groups', this.name, 'dead-letters', verb], { body });
    const gone = results.filter(({ verdict }) => verdict === 'not_found').length;
    const sentence = `${count(done)} ${verb === 'resend' ? 'sent again' : 'deleted'}.`;
    return gone ? [`${sentence} ${count(gone)} were not there any more.`, 'warn'] : [sentence, 'good'];
  }

  done() {
    this.chosen.clear();
    for (const input of this.table.node.querySelectorAll('input:checked')) input.checked = false;
    this.poll.now();
  }

  look(row) {
    showDialog('Dead letter', el('div', { class: 'stack' }, facts([...about(row), ['Given up', instant(row.died_ms)], ['Attempts', row.attempts],
      ['Reason', row.reason && bdi(row.reason, 500)], ['Tag', row.tag && bdi(row.tag)]]), bodyView(row), propertiesView(row.properties)));
  }
}

function showDied(cell, row) {
  const [when, away] = cell.children;
  write(when, instant(row.died_ms));
  write(away, distance(row.died_ms, broker.nowMs()));
}

const preview = row => (row.body !== undefined ? printable(row.body, PREVIEW) || '(empty)' : row.base64 !== undefined ? '(no text)' : 'show');
