// Bulk operations on all pending messages that meet a condition: dry run, apply and undo.

import { ask, get } from '../api.js';
import { BarList } from '../charts.js';
import { confirm, facts, field, select } from '../dialogs.js';
import { button, el, emptiness, section, set, show, write } from '../dom.js';
import { count, instant, printable, span, zone } from '../format.js';
import { bdi } from '../messages.js';
import { Loading } from '../loading.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { DataTable } from '../table.js';

const EVERY_MS = 3_000;
const TONES = { active: 'good', undone: 'warn', over: '' };
const DRY_RUN = 'timeball selections cancel --topic orders --where "region = \'eu\'" --dry-run';

// The operations. `fields()` creates the fields that only this operation has: their nodes, and `read()`, which returns
// their part of the request.
const NO_FIELDS = () => ({ nodes: [], read: () => ({}) });
const OPERATIONS = [
  { action: 'cancel', label: 'Cancel', note: 'They will not be delivered.', done: 'Cancelled', isDangerous: true, fields: NO_FIELDS },
  { action: 'shift', label: 'Shift', note: 'They will be due at other times, and at once if these have passed.', done: 'Shifted', fields: () => ownField('shift', 'Shift by', 'As in 30m or 2h. Earlier with a minus: -30m.') },
  { action: 'pause', label: 'Pause', note: 'They will not be released before they are resumed.', done: 'Paused', fields: NO_FIELDS },
  { action: 'resume', label: 'Resume', note: 'Paused messages will be released when they are due, and at once if they were.', done: 'Resumed', fields: NO_FIELDS },
  { action: 'release', label: 'Release', note: 'They will be released now, also paused ones.', done: 'Released', isDangerous: true, fields: NO_FIELDS },
  { action: 'move', label: 'Move', note: 'They will be released to the other topic, when they are due.', done: 'Moved', fields: () => ownField('to_topic', 'To topic') },
];

/** Return the only field of an operation, as `fields()` does. */
function ownField(name, label, hint) {
  const input = el('input', { spellcheck: 'false', autocomplete: 'off' });
  return { nodes: [field(label, input, hint)], read: () => ({ [name]: input.value.trim() }) };
}

const messages = n => `${count(n)} ${n === 1 ? 'message' : 'messages'}`;
// An instant without its milliseconds.
const second = ms => instant(ms - (ms % 1_000));
const operationOf = action => OPERATIONS.find(each => each.action === action) ?? { label: action };

export const bulk = {
  id: 'bulk',
  title: 'Bulk operations',
  open: root => new Bulk(root),
};

class Bulk {
  constructor(root) {
    this.operation = select(OPERATIONS.map(({ action, label }) => [action, label]), OPERATIONS[0].action, { onchange: () => this.choose() });
    this.where = el('input', { spellcheck: 'false', autocomplete: 'off', class: 'mono' });
    this.topics = el('input', { spellcheck: 'false', autocomplete: 'off' });
    this.from = el('input', { type: 'datetime-local', step: '1' });
    this.to = el('input', { type: 'datetime-local', step: '1' });
    this.own = el('div', { class: 'columns' });
    this.apply = button('Apply', () => this.ask(), 'primary');
    this.verdict = el('p', { class: 'verdict', role: 'status', hidden: true });
    this.found = el('div', { class: 'stack', hidden: true });
    this.load = new BarList('Messages of each hour, before and after');
    const form = el('form', { class: 'card admin', novalidate: true, onsubmit: event => this.dryRun(event), oninput: () => this.forget() },
      el('div', { class: 'columns' }, field('Operation', this.operation), field('Topics', this.topics, 'Separated by blanks. Empty for all.')),
      field('Condition', this.where, "SQL, as in region = 'eu' AND due_ms < 1927616400000. TRUE selects all messages."),
      el('div', { class: 'columns' }, field(`Due from (${zone()})`, this.from), field('Due before', this.to)), this.own,
      el('div', { class: 'actions' }, el('button', { type: 'submit' }, 'Dry run'), this.apply), this.verdict, this.found);
    this.refused = refusal();
    const done = () => this.poll.now();
    this.table = new DataTable({
      caption: 'Bulk operations, the newest first', keyOf: row => row.id,
      empty: emptiness('No bulk operations.', 'An operation covers the messages that are pending when it is accepted. Try one without effect:', DRY_RUN),
      columns: [
        { label: 'Operation', make: () => [el('bdi', { class: 'when' }), el('span', { class: 'away mono' })], update: showOperation },
        { label: 'Condition', kind: 'what', make: () => el('bdi', { class: 'text mono' }), update: (cell, row) => write(cell.firstChild, printable(conditionOf(row), 300)) },
        { label: 'State', make: () => [el('span', { class: 'state' }), el('bdi', { class: 'text away' })], update: showState },
        { label: 'Messages', kind: 'number', value: row => (row.count === undefined ? 'counting' : count(row.count)) },
        { label: 'Due', make: () => [el('span', { class: 'when' }), el('span', { class: 'away' })], update: showDue },
        { label: 'Actions', isUnseen: true, kind: 'actions-cell admin', make: row => button('Undo', () => undo(row(), done)), update: (cell, { state }) => show(cell.firstChild, state === 'active') },
      ],
    });
    const list = section('Operations', this.table.node);
    this.loading = new Loading(list);
    root.append(this.refused.node, form, this.loading.node, list);
    this.poll = new Poll({ everyMs: EVERY_MS, read: signal => get(['v1', 'selections'], {}, signal), show: ({ selections }) => {
      this.refused.show(null);
      this.table.show([...selections].reverse());
    }, fail: error => this.refused.show(error), loading: this.loading }).start();
    this.choose();
  }

  close() {
    this.poll.stop();
  }

  /** Show the fields of the chosen operation. */
  choose() {
    this.chosen = operationOf(this.operation.value);
    this.fields = this.chosen.fields();
    this.own.replaceChildren(...this.fields.nodes);
    this.forget();
  }

  /** Forget a dry run after a change of the request, and let the user not apply it. */
  forget() {
    this.tried = null;
    show(this.found, false);
    show(this.verdict, false);
    this.apply.disabled = true;
  }

  /** Return the request of the form. */
  read() {
    const at = input => (input.value ? new Date(input.value).getTime() : undefined);
    return { action: this.chosen.action, where: this.where.value.trim(), topics: this.topics.value.split(/[\s,]+/).filter(Boolean),
      from: at(this.from), to: at(this.to), ...this.fields.read() };
  }

  async dryRun(event) {
    event.preventDefault();
    this.forget();
    const request = this.read();
    let found;
    try {
      found = await ask('POST', ['v1', 'selections', 'dry-run'], { body: request });
    } catch (error) {
      this.say(error.code ? `${error.message} (${error.code})` : error.message, 'bad');
      return;
    }
    // The user has changed the request meanwhile, which needs another dry run.
    if (JSON.stringify(request) !== JSON.stringify(this.read())) return;
    this.tried = { request, found };
    this.apply.disabled = found.count === 0;
    this.say(found.count ? `${messages(found.count)} would be covered now. Nothing has changed.` : 'No pending message meets this.', found.count ? 'good' : 'warn');
    this.showFound(found);
  }

  /** Show a text below the form. */
  say(text, tone) {
    write(this.verdict, printable(text, 500));
    this.verdict.className = `verdict ${tone}`;
    show(this.verdict, true);
  }

  /** Show the result of a dry run: samples, and the load of each hour before and after. */
  showFound({ samples = [], load = [], first_due: first, last_due: last }) {
    show(this.found, samples.length > 0);
    const shown = samples.map(({ due_ms: ms, topic, id, keys = [] }) => [instant(ms), bdi([topic, ...keys, id ?? ''].join(' '), 160)]);
    this.load.show(load.map(({ hour, before, after }) => ({ label: instant(Date.parse(hour)), n: before, after })), row => `${count(row.n)} → ${count(row.after)}`);
    this.found.replaceChildren(facts([['First due', first && instant(Date.parse(first))], ['Last due', last && instant(Date.parse(last))]]),
      el('h2', {}, 'The first of them'), facts(shown), el('h2', {}, 'Messages of each hour, before and after'), this.load.node);
  }

  /** Apply the operation of the last dry run, after a confirmation. */
  ask() {
    const { request, found } = this.tried;
    const { label, note, done: word, isDangerous } = this.chosen;
    confirm({ title: `${label} ${messages(found.count)}?`, about: [['Operation', bdi(operationText(request))], ['Condition', bdi(conditionOf(request), 500)]],
      note: `${note} It covers the messages that are pending at that moment. You can undo it for those that are not due by then.`, label: `${label} them`, isDangerous,
      done: () => this.poll.now(),
      act: async () => {
        const { id } = await ask('POST', ['v1', 'selections'], { body: request });
        this.forget();
        return [`${word}: operation ${id}.`, 'good'];
      } });
  }
}

/** Return the text of a request or an operation, with its shift or topic: "Shift by 2 h", "Move to orders-eu". */
function operationText({ action, shift, shift_ms: ms, to_topic: topic }) {
  const by = shift ?? (ms && span(ms));
  return [operationOf(action).label, by && `by ${by}`, topic && `to ${topic}`].filter(Boolean).join(' ');
}

/** Return the condition and the bounds of a request or of an operation as one line. */
function conditionOf({ where, topics = [], from, to }) {
  const time = at => instant(typeof at === 'number' ? at : Date.parse(at));
  return [topics.length && `topic ${topics.join(', ')}`, where, from && `due from ${time(from)}`, to && `due before ${time(to)}`].filter(Boolean).join('; ');
}

function showOperation(cell, row) {
  write(cell.children[0], printable(operationText(row), 200));
  write(cell.children[1], row.id);
}

function showState(cell, { state, accepted_ms: ms, by }) {
  write(cell.firstChild, state);
  set(cell.firstChild, 'class', `state ${TONES[state] ?? ''}`);
  write(cell.lastChild, `accepted ${second(ms)}${by ? ` by ${printable(by, 60)}` : ''}`);
}

function showDue(cell, { first_due: first, last_due: last }) {
  write(cell.children[0], first ? second(Date.parse(first)) : '–');
  write(cell.children[1], last && last !== first ? `to ${second(Date.parse(last))}` : '');
}

function undo(row, done) {
  confirm({ title: 'Undo this operation?', about: [['Operation', bdi(`${operationText(row)}, ${row.id}`)], ['Condition', bdi(conditionOf(row), 500)], ['Messages', count(row.count)]],
    note: 'Its messages that are not due yet are as before.', label: 'Undo it', done,
    act: async () => {
      await ask('POST', ['v1', 'selections', row.id, 'undo']);
      return ['Undone.', 'good'];
    } });
}
