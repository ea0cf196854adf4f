// Consumer groups: their lag, their messages in flight, and their dead letters.

import { getAll } from '../api.js';
import { el, emptiness, keyed, set, write } from '../dom.js';
import { count, printable } from '../format.js';
import { Loading } from '../loading.js';
import { bdi } from '../messages.js';
import { Poll } from '../poll.js';
import { refusal } from '../refusal.js';
import { DataTable } from '../table.js';

const EVERY_MS = 2_000;
const RECEIVE = `curl -s -X POST '${location.origin}/v1/topics/reminders/receive?group=workers&wait=30s'`;

export const groups = {
  id: 'groups',
  title: 'Groups',
  open(root) {
    const refused = refusal();
    const table = new DataTable({
      caption: 'Consumer groups', keyOf: row => row.group,
      empty: emptiness('No group has received anything yet.', 'A group is made by the first receive in its name:', RECEIVE),
      columns: [
        { label: 'Group', make: row => el('div', {}, bdi(row().group, 80), el('ul', { class: 'lines' })), update: showConflicts },
        { label: 'Lag', kind: 'number', value: row => count(row.lag) },
        { label: 'In flight', kind: 'number', value: row => count(row.in_flight) },
        { label: 'Expired unread', kind: 'number', make: () => el('span'), update: showExpired },
        { label: 'Dead letters', kind: 'number', make: row => el('a', { href: `#/dead-letters?${new URLSearchParams({ group: row().group })}` }),
          update: (cell, row) => write(cell.firstChild, count(row.dead_letters)) },
        { label: 'Attempts', kind: 'number', value: row => (row.attempts_max ? `at most ${count(row.attempts_max)}` : '–') },
        { label: 'Topics: lag, in flight, expired', make: () => el('ul', { class: 'lines' }), update: showTopics },
      ],
    });
    const card = el('section', { class: 'card' }, table.node);
    const loading = new Loading(card);
    root.append(refused.node, loading.node, card);
    const poll = new Poll({
      everyMs: EVERY_MS,
      read: signal => getAll(['v1', 'groups'], 'groups', signal),
      show: found => {
        refused.show(null);
        table.show(found.sort((a, b) => b.lag - a.lag || (a.group < b.group ? -1 : 1)));
      },
      fail: error => refused.show(error),
      loading,
    }).start();
    return { close: () => poll.stop() };
  },
};

/** Show the topics of which members of the group want different messages, so that each member loses some. */
function showConflicts(cell, row) {
  const text = ({ topic, wanted }) => `Members want different ${topic ? `messages of ${printable(topic, 60)}` : 'topics'}: ${wanted.map(each => printable(each, 60)).join('; ')}`;
  keyed(cell.firstChild.lastChild, row.conflicts ?? [], ({ topic }) => topic, () => el('li', { class: 'state warn' }),
    (item, conflict) => write(item, text(conflict)));
}

/** Show how many messages expired before the group read them, and how many of its dead letters expired. */
function showExpired(cell, row) {
  const letters = row.expired_dead_letters ? `, dead letters ${count(row.expired_dead_letters)}` : '';
  write(cell.firstChild, `${count(row.expired ?? 0)}${letters}`);
  set(cell.firstChild, 'class', (row.expired || row.expired_dead_letters) && 'state warn');
}

function showTopics(cell, row) {
  keyed(cell.firstChild, row.topics ?? [], ({ topic }) => topic, ({ topic }) => el('li', {}, nameOf(topic, row.group), el('span')),
    (item, { lag, in_flight: inFlight, expired }) => {
      write(item.lastChild, `  ${count(lag)}, ${count(inFlight ?? NaN)}, ${count(expired ?? 0)}`);
      set(item, 'class', lag > 0 && 'behind');
    });
}

/** Return the name of a topic. A retry topic is shown as the topic of its messages, with a note. */
function nameOf(topic, group) {
  const prefix = `%RETRY%${group}_`;
  const [name, note] = topic.startsWith(prefix) ? [topic.slice(prefix.length), ', to be tried again'] : [topic, ''];
  return el('span', { title: printable(topic, 200) }, el('bdi', { class: 'text' }, printable(name, 60)), note);
}
