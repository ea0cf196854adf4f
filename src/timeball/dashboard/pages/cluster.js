// The groups of a cluster: the leader, the state of each replica, and problems.

import { get } from '../api.js';
import { broker, follow } from '../broker.js';
import { el, emptiness, keyed, set, show, write } from '../dom.js';
import { count, printable, span } from '../format.js';
import { Loading } from '../loading.js';
import { bdi } from '../messages.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { DataTable } from '../table.js';

const EVERY_MS = 2_000;
const TONES = { leader: 'good', follower: 'good', learner: 'warn', silent: 'warn', gone: 'bad', stopped: 'bad' };
const CLOCK_MS_MAX = 500; // a new leader whose clock is ahead by this releases early by as much (docs/cluster.md)

export const cluster = {
  id: 'cluster',
  title: 'Cluster',
  isShown: status => status.replica !== undefined,
  open(root) {
    const refused = refusal();
    const groups = el('div', { class: 'stack' });
    const alone = emptiness('This broker is alone.', 'Three of them keep one log, each message on two disks:', 'timeball serve --cluster shop --node a --etcd …');
    const [loading, unseen] = [new Loading(groups), refusal()];
    root.append(refused.node, unseen.node, loading.node, groups, alone);
    show(alone, false);
    const poll = new Poll({
      everyMs: EVERY_MS,
      read: signal => get(['v1', 'cluster'], {}, signal),
      show: found => {
        refused.show(null);
        keyed(groups, found.groups, ({ group }) => group, card, update);
      },
      fail: error => refused.show(error),
      loading,
    });

    // A single broker is not asked for its cluster.
    function draw() {
      const isAlone = broker.status.replica === undefined;
      show(alone, isAlone);
      if (isAlone) loading.done();
      if (!isAlone && poll.isStopped) poll.start();
    }

    // The groups come by another request, whose poll ends the loading, so `done` does nothing here.
    const leave = follow({ done() {}, lost: reason => loading.lost(reason), refused: () => loading.refused() }, unseen, draw);
    return { close: () => {
      leave();
      poll.stop();
    } };
  },
};

function card({ group }) {
  const node = el('section', { class: 'card' }, el('h2', {}, 'Group ', bdi(group, 64)), el('p', { class: 'leads' }), el('div', { class: 'stack problems' }));
  node.replicas = new DataTable({
    caption: `Replicas of group ${printable(group, 64)}`, keyOf: row => row.replica,
    columns: [
      { label: 'Node', make: row => bdi(row().node, 64) },
      { label: 'Role', make: () => el('span'), update: showRole },
      { label: 'Rows', kind: 'number', value: row => count(row.log_seq ?? NaN) },
      { label: 'Behind', kind: 'number', value: row => count(row.lag_rows ?? NaN) },
      { label: 'Not applied', kind: 'number', value: row => count(Math.max(0, row.committed_seq - row.applied_seq)) },
      { label: 'Clock', kind: 'number', make: () => el('span'), update: showClock },
      { label: 'Version', value: row => row.version || '–' },
      { label: 'For', kind: 'number', value: row => (row.since_ms ? span(Math.max(0, broker.nowMs() - row.since_ms)) : '–') },
    ],
  });
  node.append(node.replicas.node);
  return node;
}

function update(node, group) {
  const leads = node.querySelector('.leads');
  const asked = group.asked ? `; asked for: ${group.asked}` : '';
  write(leads, group.leader ? `${printable(group.leader, 64)} leads, epoch ${count(group.epoch)}${asked}` : 'No leader: nothing is accepted or released.');
  set(leads, 'class', group.leader ? 'leads' : 'leads verdict bad');
  keyed(node.querySelector('.problems'), group.problems, text => text, text => el('p', { class: 'verdict warn' }, printable(text, 400)));
  node.replicas.show(group.replicas);
}

function showRole(cell, row) {
  write(cell.firstChild, row.is_in_record || row.role === 'learner' ? row.role : `${row.role}, no replica`);
  set(cell.firstChild, 'class', `state ${TONES[row.role] ?? ''}`.trim());
}

function showClock(cell, row) {
  const offsetMs = row.clock_offset_ms;
  write(cell.firstChild, offsetMs === null || offsetMs === undefined ? '–' : `${offsetMs > 0 ? '+' : ''}${offsetMs.toFixed(1)} ms`);
  set(cell.firstChild, 'class', Math.abs(offsetMs ?? 0) > CLOCK_MS_MAX && 'state bad');
}
