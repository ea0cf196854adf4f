// The jobs of the pipeline, and the last audit.

import { get } from '../api.js';
import { broker } from '../broker.js';
import { facts } from '../dialogs.js';
import { el, emptiness, set, show, write } from '../dom.js';
import { count, distance, instant, printable } from '../format.js';
import { Loading } from '../loading.js';
import { bdi } from '../messages.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { DataTable } from '../table.js';

const EVERY_MS = 5_000;
const SILENT_MS = 20_000; // a running job reports every five seconds
const LIVES = new Set(['starting', 'running', 'waiting']);
const TONES = { running: 'good', waiting: 'good', failed: 'bad', silent: 'warn' };
// Each accepted message is counted in one of SIDES. FAULTS count errors, and are 0 if there is none.
const SIDES = ['released', 'cancelled', 'expired', 'replaced', 'selected', 'missed', 'pending'];
const FAULTS = ['lost', 'early', 'duplicate', 'unknown', 'changed', 'overdue', 'queue_gaps'];

export const pipeline = {
  id: 'pipeline',
  title: 'Pipeline and audit',
  open(root) {
    const refused = refusal();
    const jobs = new DataTable({
      caption: 'Jobs of the pipeline', keyOf: row => row.job,
      empty: emptiness('No job of the pipeline has reported.', 'The jobs move, count and archive what waits, with Spark. They run beside the broker:',
        'timeball pipeline run'),
      columns: [
        { label: 'Job', make: row => bdi(row().job, 60) },
        { label: 'State', make: () => el('span'), update: showState },
        { label: 'Last heard of', make: () => [el('span', { class: 'when' }), el('span', { class: 'away' })], update: showHeard },
        { label: 'Micro-batches', kind: 'number', value: row => count(row.epochs ?? NaN) },
        { label: 'Rows', kind: 'number', value: row => count(row.rows ?? NaN) },
        { label: 'Behind', kind: 'number', value: row => lag(row.last) },
        { label: 'Error', make: () => el('bdi', { class: 'text' }), update: (cell, row) => write(cell.firstChild, row.error ? printable(row.error, 400) : '–') },
      ],
    });
    const books = el('div', { class: 'stack' });
    const unaudited = emptiness('No audit has been made.', 'An audit compares what was accepted with what was released, cancelled and waits still:', 'timeball audit');
    const cards = el('div', { class: 'stack' }, el('section', { class: 'card' }, el('h2', {}, 'Jobs'), jobs.node),
      el('section', { class: 'card' }, el('h2', {}, 'Last audit'), books, unaudited));
    const loading = new Loading(cards);
    root.append(refused.node, loading.node, cards);
    let shown = '';
    const poll = new Poll({
      everyMs: EVERY_MS,
      read: signal => get(['v1', 'jobs'], {}, signal),
      show: found => {
        refused.show(null);
        jobs.show(found.jobs ?? []);
        show(unaudited, !found.audit);
        const text = JSON.stringify(found.audit ?? null);
        if (text !== shown) books.replaceChildren(...(found.audit ? balance(found.audit) : []));
        shown = text;
      },
      fail: error => {
        // 404: this broker has no reports of jobs. The page shows the command that starts them.
        if (error.status !== 404) {
          refused.show(error);
          return;
        }
        loading.done();
        jobs.show([]);
      },
      loading,
    }).start();
    return { close: () => poll.stop() };
  },
};

const isSilent = row => LIVES.has(row.state) && row.updated_ms !== undefined && broker.nowMs() - row.updated_ms > SILENT_MS;

function showState(cell, row) {
  const state = isSilent(row) ? 'silent' : row.state;
  write(cell.firstChild, state);
  set(cell.firstChild, 'class', `state ${TONES[state] ?? ''}`);
}

function showHeard(cell, row) {
  write(cell.children[0], row.updated_ms === undefined ? '–' : instant(row.updated_ms));
  write(cell.children[1], row.updated_ms === undefined ? '' : distance(row.updated_ms, broker.nowMs()));
}

const lag = last => (last ? `${count(last.lag)} ${last.unit === 'seq' ? 'rows' : 'ms'}` : '–');

/** Return an audit as a verdict and a list: the accepted messages, and the number in each state. */
function balance(audit) {
  const sum = SIDES.reduce((all, side) => all + (audit[side] ?? 0), 0);
  const faults = FAULTS.filter(name => audit[name] > 0);
  const verdict = el('p', { class: `verdict ${audit.ok ? 'good' : 'bad'}` }, audit.ok ? 'The books balance.'
    : `The books do not balance: ${faults.map(name => `${count(audit[name])} ${name.replace('_', ' ')}`).join(', ') || 'see the report'}.`);
  const atMs = audit.at_ms ?? audit.scope?.now_ms;
  return [verdict, facts([
    ['Audited', atMs === undefined ? '' : instant(atMs)],
    ['Accepted', count(audit.accepted)],
    ...SIDES.map(side => [side[0].toUpperCase() + side.slice(1), count(audit[side] ?? 0)]),
    ['Difference', count(audit.accepted - sum)],
    ...FAULTS.map(name => [name.replace('_', ' '), audit[name] === undefined ? '' : count(audit[name])]),
  ])];
}
