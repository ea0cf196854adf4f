// Push subscriptions: their receivers and states, and the dialogs that create, change, pause, resume and delete one.

import { ask, get, getAll } from '../api.js';
import { confirm, field, select } from '../dialogs.js';
import { button, el, emptiness, set, show, write } from '../dom.js';
import { count, printable } from '../format.js';
import { bdi } from '../messages.js';
import { Loading } from '../loading.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { DataTable } from '../table.js';

const EVERY_MS = 2_000;
const TONES = { delivering: 'good', failing: 'bad', paused: 'warn', gone: 'warn' };
const NOTES = {
  delivering: 'circuit closed',
  failing: 'circuit open: one request at a time tries the receiver',
  paused: 'nothing is sent',
  gone: 'the receiver answered 410: nothing is sent',
};
const MAKE = `curl -s -X PUT ${location.origin}/v1/subscriptions/billing -H 'content-type: application/json' \\
  -d '{"topic": "orders", "group": "billing", "url": "https://billing.example"}'`;

export const push = {
  id: 'push',
  title: 'Push',
  open(root) {
    const refused = refusal();
    const names = new Set();
    const done = () => poll.now();
    const table = new DataTable({
      caption: 'Push subscriptions', keyOf: row => row.name,
      empty: emptiness('No push subscriptions.', 'A subscription has the broker send the messages of a topic to a URL:', MAKE),
      columns: [
        { label: 'Subscription', kind: 'what', make: () => [el('bdi', { class: 'text mono' }), el('bdi', { class: 'text away' }), el('bdi', { class: 'text away mono' })], update: showWhat },
        { label: 'State', make: () => [el('span', { class: 'state' }), el('span', { class: 'away' }), el('bdi', { class: 'text away' })], update: showState },
        { label: 'In flight', kind: 'number', value: row => `${count(row.in_flight)} of ${count(row.in_flight_max)}` },
        { label: 'Delivered', kind: 'number', value: row => count(row.delivered) },
        { label: 'Failed', kind: 'number', value: row => count(row.failed) },
        { label: 'Dead letters', kind: 'number', make: () => el('a', {}), update: showDead },
        { label: 'Actions', isUnseen: true, kind: 'actions-cell many admin', make: row => actions(row, done), update: showActions },
      ],
    });
    const bar = el('div', { class: 'toolbar admin' }, button('New subscription', () => make(names, done), 'primary'));
    const loading = new Loading(table.node);
    root.append(refused.node, el('section', { class: 'card' }, bar, loading.node, table.node,
      el('p', { class: 'hint' }, 'Delivered and failed are requests since the broker’s start; dead letters are those of the group.')));
    const poll = new Poll({
      everyMs: EVERY_MS,
      read,
      show: rows => {
        refused.show(null);
        names.clear();
        for (const { name } of rows) names.add(name);
        table.show(rows);
      },
      fail: error => refused.show(error),
      loading,
    }).start();
    return { close: () => poll.stop() };
  },
};

/** Return the subscriptions, each with the number of dead letters of its group. */
async function read(signal) {
  const [{ subscriptions }, groups] = await Promise.all([get(['v1', 'subscriptions'], {}, signal), getAll(['v1', 'groups'], 'groups', signal)]);
  const dead = new Map(groups.map(each => [each.group, each.dead_letters]));
  return subscriptions.map(each => ({ ...each, dead_letters: dead.get(each.group) ?? 0 }));
}

function showWhat(cell, row) {
  write(cell.children[0], printable(row.name, 80));
  write(cell.children[1], `${printable(row.topic, 80)}, as ${printable(row.group, 80)}${row.filter === '*' ? '' : `, only ${printable(row.filter, 80)}`}`);
  write(cell.children[2], printable(row.url, 120));
}

function showState(cell, row) {
  write(cell.children[0], row.state);
  set(cell.children[0], 'class', `state ${TONES[row.state] ?? ''}`);
  write(cell.children[1], NOTES[row.state] ?? '');
  const inRow = row.failures_in_row > 1 ? ` (${count(row.failures_in_row)} in a row)` : '';
  write(cell.children[2], row.last_failure ? `last failure: ${printable(row.last_failure, 200)}${inRow}` : '');
}

function showDead(cell, row) {
  set(cell.firstChild, 'href', `#/dead-letters?${new URLSearchParams({ group: row.group })}`);
  write(cell.firstChild, count(row.dead_letters));
}

// ---- actions on a subscription ------------------------------------------------------------------------------------

function actions(row, done) {
  return el('span', { class: 'actions' },
    button('Try now', () => resume(row(), done), '', { 'data-verb': 'try' }),
    button('Pause', () => pause(row(), done), '', { 'data-verb': 'pause' }),
    button('Resume', () => resume(row(), done), '', { 'data-verb': 'resume' }),
    button('Change', () => change(row(), done)),
    button('Delete', () => remove(row(), done)));
}

function showActions(cell, { state }) {
  const isPaused = state === 'paused' || state === 'gone';
  const may = { try: state === 'failing', pause: !isPaused, resume: isPaused };
  for (const each of cell.querySelectorAll('[data-verb]')) show(each, may[each.dataset.verb]);
}

const pathOf = (name, ...verb) => ['v1', 'subscriptions', name, ...verb];
const about = row => [['Subscription', bdi(row.name)], ['Topic', bdi(row.topic)], ['Group', bdi(row.group)], ['URL', bdi(row.url, 500)]];

function pause(row, done) {
  confirm({ title: 'Pause this subscription?', about: about(row), note: 'Nothing more is sent; what comes meanwhile waits in the topic.',
    label: 'Pause', done, act: async () => {
      await ask('POST', pathOf(row.name, 'pause'));
      return ['Paused: nothing more is sent.', 'good'];
    } });
}

function resume(row, done) {
  const isFailing = row.state === 'failing';
  confirm({ title: isFailing ? 'Try the receiver now?' : 'Resume this subscription?', about: about(row), label: isFailing ? 'Try now' : 'Resume', done,
    act: async () => {
      await ask('POST', pathOf(row.name, 'resume'));
      return [isFailing ? 'It is tried now.' : 'Resumed: it goes on at once.', 'good'];
    } });
}

function remove(row, done) {
  confirm({ title: 'Delete this subscription?', about: about(row), note: 'Nothing more is sent, and its secret is gone. The group, and how far it has come, stay.',
    label: 'Delete the subscription', isDangerous: true, done, act: async () => {
      await ask('DELETE', pathOf(row.name));
      return ['Deleted.', 'good'];
    } });
}

function make(names, done) {
  const name = el('input', { spellcheck: 'false', autocomplete: 'off' });
  const form = fieldsOf({});
  confirm({ title: 'New push subscription', fields: [field('Name', name), ...form.fields], label: 'Make it', done, act: async () => {
    const wanted = name.value.trim();
    if (!wanted) return ['Give it a name.', 'again'];
    // A PUT would change the existing subscription.
    if (names.has(wanted)) return ['There is a subscription of this name: change that one.', 'again'];
    return verdictOf(await ask('PUT', pathOf(wanted), { body: form.read() }), 'Made.');
  } });
}

function change(row, done) {
  const form = fieldsOf(row);
  const rotate = select([['false', 'Keep it'], ['true', 'Make another: for 24 hours requests are signed by both']], 'false');
  confirm({ title: 'Change this subscription', about: [['Subscription', bdi(row.name)]], fields: [...form.fields, field('Secret', rotate)], label: 'Change it', done,
    act: async () => verdictOf(await ask('PUT', pathOf(row.name), { body: { ...form.read(), rotate_secret: rotate.value === 'true' } }), 'Changed.') });
}

/** Return the filled-in fields of a subscription, and `read()`, which returns all of them: a PUT replaces all. */
function fieldsOf(row) {
  const text = value => el('input', { spellcheck: 'false', autocomplete: 'off', value: value ?? '' });
  const number = (value, attributes) => el('input', { type: 'number', value: value ?? '', ...attributes });
  const topic = text(row.topic);
  const group = text(row.group);
  const url = text(row.url);
  const kind = select([['tag', 'Tags'], ['sql', 'SQL condition']], row.filter_type ?? 'tag');
  const filter = text(row.filter ?? '*');
  const inFlight = number(row.in_flight_max ?? 16, { min: 1, step: 1 });
  const rate = number(row.rate_per_s, { min: 0, step: 'any' });
  const timeout = text(row.timeout ?? '15s');
  return {
    fields: [field('Topic', topic), field('Group', group, 'As which consumer group. Those of one group share its messages.'),
      field('URL', url, 'http or https, on the open internet; others only as --push-allow says.'), field('Filter by', kind), field('Filter', filter, '* lets all pass; red || blue by tags.'),
      field('In flight at most', inFlight), field('Requests a second', rate, 'Empty for no bound.'), field('Timeout', timeout, 'For the whole of a request: 15s, 2m.')],
    read: () => ({ topic: topic.value.trim(), group: group.value.trim(), url: url.value.trim(), filter_type: kind.value, filter: filter.value.trim() || '*',
      in_flight_max: Number(inFlight.value || 16), rate_per_s: rate.value === '' ? null : Number(rate.value), timeout: timeout.value.trim() || '15s' }),
  };
}

/** Return a verdict for `confirm`, with the secret if the answer has one. */
function verdictOf({ secret }, sentence) {
  if (!secret) return [sentence, 'good'];
  const shown = el('input', { class: 'mono', readonly: true, value: secret, spellcheck: 'false', onfocus: () => shown.select() });
  return [`${sentence} The secret is shown this once: put it where the receiver reads it.`, 'good', field('Secret that signs the requests', shown)];
}
