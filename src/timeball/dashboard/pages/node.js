// The process of the broker: its memory, its disk, its log and its clock.

import { broker, follow, waiting } from '../broker.js';
import { facts } from '../dialogs.js';
import { el, keyed, section, show, write } from '../dom.js';
import { bytes, count, instant, span } from '../format.js';
import { Loading } from '../loading.js';
import { refusal } from '../refusal.js';
import { Tile, tiles } from '../tiles.js';

const ROOM_BYTES = 5 * 1024 ** 3; // less free space is shown as a warning

export const node = {
  id: 'node',
  title: 'Node',
  open(root) {
    const memory = new Tile('Memory held');
    const disk = new Tile('Disk free');
    const log = new Tile('Log');
    const clockTile = new Tile('Clock');
    const refused = el('p', { class: 'verdict bad', role: 'status', hidden: true });
    const lists = el('div', { class: 'columns' });
    const top = tiles(memory, disk, log, clockTile);
    const [unseen, loading] = [refusal(), new Loading(top, lists)];
    root.append(refused, unseen.node, loading.node, top, lists);

    function draw() {
      const { status } = broker;
      const room = status.disk;
      memory.show(bytes(status.anon_bytes), `${bytes(status.rss_bytes)} with mapped files`);
      disk.show(bytes(room.free_bytes), room.no_room ? 'sends are refused' : 'on the disk of the data folder',
        room.no_room ? 'bad' : room.free_bytes < ROOM_BYTES ? 'warn' : 'good');
      log.show(bytes(status.log.bytes), `${count(status.log.next_seq - status.log.first_seq)} rows`);
      clockTile.show(Math.abs(broker.aheadMs) < 1_000 ? 'in step' : `${span(Math.abs(broker.aheadMs))} ${broker.aheadMs > 0 ? 'ahead' : 'behind'}`,
        status.clock_suspect ? 'it was set while the broker ran' : 'the broker’s, beside this machine’s', status.clock_suspect ? 'warn' : '');
      show(refused, Boolean(room.no_room));
      write(refused, `New messages are refused: ${room.no_room}. Free some space; the broker goes on by itself.`);
      const groups = groupsOf(status);
      keyed(lists, groups, ([title]) => title, ([title]) => section(title, facts([])), (card, [, pairs]) => update(card, pairs));
    }

    return { close: follow(loading, unseen, draw) };
  },
};

/** Update a list in place. Pairs without a value are left out. */
function update(card, pairs) {
  const known = pairs.filter(([, value]) => value !== undefined && value !== '');
  keyed(card.querySelector('dl'), known, ([name]) => name,
    ([name]) => el('div', {}, el('dt', {}, name), el('dd')), (pair, [, value]) => write(pair.lastChild, value));
}

/** Return the lists of the page: a title, and pairs of a name and a text. */
function groupsOf(status) {
  const { log, schedule, table, access, transactions } = status;
  return [
    ['Broker', [
      ['Version', `timeball ${status.version}`],
      ['Process', `pid ${status.pid}`],
      ['Time', instant(status.now_ms)],
      ['Strategy', status.strategy],
      ['Durability', status.durability],
      ['Codec', status.codec],
      ['Accounts', access?.accounts ? `${count(access.accounts)}; ${count(access.refused)} requests refused` : 'no access file: every client may do everything'],
    ]],
    ['Log', [
      ['Rows kept', count(log.next_seq - log.first_seq)],
      ['On disk up to row', count(log.durable_seq)],
      ['Not on disk yet', count(log.next_seq - log.durable_seq)],
      ['Written since the start', `${count(log.rows)} rows in ${count(log.commits)} commits`],
      ['Transactions open', count(transactions?.open ?? NaN)],
    ]],
    ['Schedule', [
      ['Waiting', count(waiting(status))],
      ['Near their instant', count(schedule.near_rows)],
      ['In the log’s tail', count(schedule.tail_rows)],
      ['In the pending table', `${count(schedule.table_rows)} rows in ${count(schedule.table_files)} files`],
      ['Cancelled ahead of time', count(schedule.cancelled_rows)],
      ['For delay levels', count(status.levels?.waiting_rows ?? NaN)],
      ['Table version', table ? String(table.version) : ''],
    ]],
  ];
}
