// Pending messages: a search by key, id, topic and due time, and dialogs that show, reschedule and cancel one.

import { Problem, get } from '../api.js';
import { broker } from '../broker.js';
import { addOptions, facts, field, select, showDialog } from '../dialogs.js';
import { button, el, emptiness, set, show, write } from '../dom.js';
import { bytes, distance, instant, printable, shortened, zone } from '../format.js';
import { about, bdi, bodyView, cancelMessage, propertiesView, rescheduleMessage } from '../messages.js';
import { Loading } from '../loading.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { DataTable } from '../table.js';

const EVERY_MS = 5_000;
const ROWS = 50;
const EMPTY_PAGES = 20; // empty pages that are skipped at once; after them the user may go to the next page
const STATES = { waiting: 'warn', visible: 'good', cancelled: 'bad', expired: '' };

export const waitingPage = {
  id: 'waiting',
  title: 'Waiting',
  open: (root, parameters) => new Waiting(root, parameters),
};

class Waiting {
  constructor(root, parameters) {
    this.by = select([['key', 'Key'], ['id', 'Message id']], 'key', { id: 'by' });
    this.text = el('input', { id: 'text', type: 'search', spellcheck: 'false', autocomplete: 'off' });
    this.topic = select([['', 'All topics']], '', { id: 'topic' });
    this.from = el('input', { id: 'from', type: 'datetime-local', step: '1' });
    this.to = el('input', { id: 'to', type: 'datetime-local', step: '1' });
    const form = el('form', { class: 'card', role: 'search', onsubmit: event => this.search(event) },
      el('div', { class: 'toolbar' }, field('Find by', this.by), el('div', { class: 'wide' }, field('Text', this.text)), field('Topic', this.topic)),
      el('div', { class: 'toolbar' }, field(`Due from (${zone()})`, this.from), field('Due before', this.to),
        el('div', { class: 'actions' }, el('button', { type: 'submit', class: 'primary' }, 'Search'), button('Clear', () => this.clear()))));
    this.table = new DataTable({ caption: 'Scheduled messages that wait, the next one first', columns: this.columns(),
      keyOf: row => row.seq, empty: emptiness('Nothing waits here.', 'Nothing that waits fits the search; Clear shows all that waits.') });
    this.refused = refusal();
    this.back = button('‹ Previous', () => this.turn(-1));
    this.next = button('Next ›', () => this.turn(1));
    this.summary = el('p', { class: 'hint', role: 'status' });
    const card = el('section', { class: 'card' }, this.summary, this.table.node, el('div', { class: 'actions' }, this.back, this.next));
    this.loading = new Loading(card);
    root.append(form, this.refused.node, this.loading.node, card);
    this.clock = setInterval(() => !document.hidden && this.table.refresh(), 1_000);
    this.follow(parameters);
    this.loadTopics();
  }

  close() {
    this.poll.stop();
    clearInterval(this.clock);
  }

  columns() {
    return [
      { label: 'Due', make: () => [el('span', { class: 'when' }), el('span', { class: 'away' })], update: showDue },
      { label: 'Topic', kind: 'name', make: row => bdi(row().topic, 80) },
      { label: 'Keys', kind: 'name', make: row => bdi([row().keys ?? ''].flat().join(' '), 80) },
      { label: 'Id', make: row => (row().id ? button(shortened(row().id), () => this.look(row()), 'link mono', { title: printable(row().id) }) : '–') },
      { label: 'Size', kind: 'number', value: row => (row.size_bytes === undefined ? '–' : bytes(row.size_bytes)) },
      { label: 'Actions', isUnseen: true, kind: 'actions-cell admin', make: row => (row().id ? actions(row, () => this.poll.now()) : '') },
    ];
  }

  follow(parameters) {
    this.asked = Object.fromEntries(['key', 'id', 'topic', 'from', 'to'].map(name => [name, parameters.get(name) ?? '']));
    const { key, id, topic, from, to } = this.asked;
    this.by.value = id ? 'id' : 'key';
    this.text.value = id || key;
    if (topic) addOptions(this.topic, [topic]);
    this.topic.value = topic;
    this.from.value = local(from);
    this.to.value = local(to);
    this.pages = [''];
    this.poll?.stop();
    this.loading.begin(); // so that rows of another search are not shown for this one
    this.poll = new Poll({ everyMs: EVERY_MS, read: signal => this.read(signal), show: found => this.show(found),
      fail: error => this.fail(error), loading: this.loading }).start();
  }

  search(event) {
    event.preventDefault();
    const parameters = new URLSearchParams();
    const add = (name, value) => value && parameters.set(name, value);
    add(this.by.value, this.text.value.trim());
    add('topic', this.topic.value);
    if (this.by.value !== 'id') {
      add('from', this.from.value && new Date(this.from.value).getTime());
      add('to', this.to.value && new Date(this.to.value).getTime());
    }
    const hash = `#/waiting${parameters.size ? `?${parameters}` : ''}`;
    if (location.hash === hash) this.follow(parameters);
    else location.hash = hash;
  }

  clear() {
    if (location.hash === '#/waiting') this.follow(new URLSearchParams());
    else location.hash = '#/waiting';
    this.text.focus();
  }

  async read(signal) {
    const { id, topic, key, from, to } = this.asked;
    if (!id) {
      const query = { key, topic, from: rfc3339(from), to: rfc3339(to), max: ROWS, page: this.pages.at(-1) };
      let found = await get(['v1', 'messages'], query, signal);
      // The broker limits the work for a page, so a page may be empty although others follow.
      for (let n = 0; found.messages.length === 0 && found.next_page && n < EMPTY_PAGES; n += 1) {
        found = await get(['v1', 'messages'], { ...query, page: found.next_page }, signal);
      }
      return found;
    }
    const found = await get(['v1', 'messages', id], { topic }, signal);
    return { messages: found.messages.map(message => ({ id, ...message })), isById: true };
  }

  show(found) {
    this.refused.show(null);
    this.nextPage = found.next_page;
    this.table.show(found.messages);
    const n = found.messages.length;
    show(this.summary, n > 0);
    const place = this.pages.length > 1 ? `, page ${this.pages.length}` : '';
    if (found.isById) write(this.summary, n === 1 ? `It is ${found.messages[0].state}.` : `${n} messages have this id.`);
    else write(this.summary, `${n}${this.nextPage ? ' and more' : ''} ${n === 1 ? 'waits' : 'wait'}${place}, the next one first.`);
    show(this.back, this.pages.length > 1);
    show(this.next, Boolean(this.nextPage));
  }

  fail(error) {
    // 404 for an id means that no message has it, which is an empty result.
    if (error.status === 404 && this.asked.id) {
      this.loading.done();
      this.show({ messages: [], isById: true });
      return;
    }
    this.refused.show(error);
  }

  turn(by) {
    if (by > 0 && this.nextPage) this.pages.push(this.nextPage);
    else if (by < 0 && this.pages.length > 1) this.pages.pop();
    this.poll.now();
  }

  async loadTopics() {
    try {
      const { topics } = await get(['v1', 'topics']);
      addOptions(this.topic, topics.map(({ topic }) => topic));
    } catch (error) {
      // The page works without the list of topics. Its poll shows the error.
      if (!(error instanceof Error)) throw error;
    }
  }

  async look(row) {
    let found = row;
    try {
      const { messages } = await get(['v1', 'messages', row.id], { topic: row.topic });
      found = { ...row, ...(messages.find(each => each.seq === row.seq) ?? messages[0]) };
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
    }
    showDialog('Message', el('div', { class: 'stack' }, facts([...about(found), ...placeOf(found)]), bodyView(found), propertiesView(found.properties)));
  }
}

function showDue(cell, row) {
  const [when, away] = cell.children;
  write(when, row.due_ms === undefined ? '–' : instant(row.due_ms));
  const isWaiting = row.state === undefined || row.state === 'waiting';
  write(away, row.held ? 'held' : isWaiting ? distance(row.due_ms, broker.nowMs()) : row.state);
  set(away, 'class', isWaiting ? 'away' : `away state ${STATES[row.state] ?? ''}`);
}

function actions(row, done) {
  return el('span', { class: 'actions' }, button('Reschedule', () => rescheduleMessage(row(), done)),
    button('Cancel', () => cancelMessage(row(), done)));
}

/** Return the facts about the state of a message. */
function placeOf(found) {
  return [
    ['State', found.state], ['Since', found.at_ms === undefined ? '' : instant(found.at_ms)],
    ['Queue', found.queue_id === undefined ? '' : `${found.queue_id}, at offset ${found.queue_offset}`],
    ...groupsOf(found), ['Cancelled by', found.by && bdi(found.by)], ['Reason', found.reason && bdi(found.reason)],
    ['Tag', found.tag && bdi(found.tag)], ['Campaign', found.campaign && bdi(found.campaign)],
    ['Size', found.size_bytes === undefined ? '' : bytes(found.size_bytes)], ['Row of the log', found.seq],
  ];
}

/** Return the state of the message in each group. */
function groupsOf({ groups = [] }) {
  return groups.map(({ group, state, attempts, until_ms: until }) => [`Group ${printable(group, 60)}`,
    `${state}${until ? ` until ${instant(until)}` : ''}${attempts ? `, handed out ${attempts === 1 ? 'once' : `${attempts} times`}` : ''}`]);
}

const rfc3339 = ms => (ms ? new Date(Number(ms)).toISOString() : '');

/** Return Unix milliseconds as the value of an input of type datetime-local. */
function local(ms) {
  if (!ms) return '';
  const when = new Date(Number(ms));
  return new Date(when.getTime() - when.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}
