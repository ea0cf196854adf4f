// Campaigns, which are bulk writes with a name: they can be paused, resumed and cancelled.

import { ask, get } from '../api.js';
import { broker } from '../broker.js';
import { confirm, field, select } from '../dialogs.js';
import { button, el, emptiness, set, show, write } from '../dom.js';
import { count, distance, instant, span } from '../format.js';
import { bdi } from '../messages.js';
import { Loading } from '../loading.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { DataTable } from '../table.js';

const EVERY_MS = 3_000;
const TONES = { running: 'good', paused: 'warn', cancelled: 'bad' };

export const campaigns = {
  id: 'campaigns',
  title: 'Campaigns',
  open(root) {
    const refused = refusal();
    const done = () => poll.now();
    const table = new DataTable({
      caption: 'Campaigns', keyOf: row => row.campaign,
      empty: emptiness('No campaigns.', 'A campaign is a bulk write with a name, so that it can be paused, resumed and cancelled as one:',
        'timeball bulk messages.parquet --campaign spring'),
      columns: [
        { label: 'Campaign', make: row => bdi(row().campaign, 80) },
        { label: 'State', make: () => el('span', { class: 'state' }), update: showState },
        { label: 'Since', make: () => [el('span', { class: 'when' }), el('span', { class: 'away' })], update: showSince },
        { label: 'Messages', kind: 'number', value: row => count(row.rows) },
        { label: 'Cancelled', kind: 'number', value: row => count(row.cancelled) },
        { label: 'Actions', isUnseen: true, kind: 'actions-cell admin', make: row => actions(row, done), update: showActions },
      ],
    });
    const card = el('section', { class: 'card' }, table.node);
    const loading = new Loading(card);
    root.append(refused.node, loading.node, card);
    const poll = new Poll({
      everyMs: EVERY_MS,
      read: signal => get(['v1', 'campaigns'], {}, signal),
      show: found => {
        refused.show(null);
        table.show([...found.campaigns].sort((a, b) => b.since_ms - a.since_ms));
      },
      fail: error => refused.show(error),
      loading,
    }).start();
    return { close: () => poll.stop() };
  },
};

function showState(cell, row) {
  write(cell.firstChild, row.state);
  set(cell.firstChild, 'class', `state ${TONES[row.state] ?? ''}`);
}

function showSince(cell, row) {
  write(cell.children[0], instant(row.since_ms));
  write(cell.children[1], distance(row.since_ms, broker.nowMs()));
}

function actions(row, done) {
  return el('span', { class: 'actions' },
    button('Pause', () => pause(row(), done), '', { 'data-verb': 'pause' }),
    button('Resume', () => resume(row(), done), '', { 'data-verb': 'resume' }),
    button('Cancel', () => cancel(row(), done), '', { 'data-verb': 'cancel' }));
}

function showActions(cell, { state }) {
  const may = { pause: state === 'running', resume: state === 'paused', cancel: ['planned', 'running', 'paused'].includes(state) };
  for (const each of cell.querySelectorAll('button')) show(each, may[each.dataset.verb]);
}

const about = row => [['Campaign', bdi(row.campaign)], ['State', row.state], ['Messages', count(row.rows)]];
const change = (row, verb, body = {}) => ask('POST', ['v1', 'campaigns', row.campaign, verb], { body });

function pause(row, done) {
  confirm({ title: 'Pause this campaign?', about: about(row), note: 'What of it waits is held until it is resumed.', label: 'Pause', done,
    act: async () => [(await change(row, 'pause')).repeated ? 'It was paused before.' : 'Paused: what waits is held.', 'good'] });
}

function resume(row, done) {
  const shift = select([['false', 'Leave each message at its instant; those that have passed come now'],
    ['true', 'Move all of them by the time that it was paused']], 'false');
  confirm({ title: 'Resume this campaign?', about: about(row), fields: [field('What was held', shift)], label: 'Resume', done,
    act: async () => {
      const { shift_ms: shiftMs, repeated } = await change(row, 'resume', { shift: shift.value === 'true' });
      return [repeated ? 'It was running before.' : shiftMs ? `Resumed, moved by ${span(shiftMs)}.` : 'Resumed.', 'good'];
    } });
}

function cancel(row, done) {
  confirm({ title: 'Cancel this campaign?', about: about(row), note: 'What of it waits is never delivered. This cannot be taken back.',
    label: 'Cancel the campaign', isDangerous: true, done,
    act: async () => {
      const { count: n } = await change(row, 'cancel');
      return [`Cancelled: ${count(n)} messages will not be delivered.`, 'good'];
    } });
}
