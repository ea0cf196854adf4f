/* The replication protocol of src/timeball/cluster/protocol, for Spin. Steps are named like the functions there.
 *
 * Spin visits every state within the bounds EPOCHS, ENTRIES, CRASHES, WIPES, CHANGES, HAND_OVERS, DISCONNECTS and
 * RESTORES, in every order of steps and messages. -DBUG=n breaks one rule, and Spin must find it. -DREACH=n fails when a step is
 * reached, which shows that the bounds allow it.
 *
 * A log is an int with four bits for each entry. An entry is its epoch plus UNIT times its number; the EPOCH row has
 * the number 0. A set is a mask of replicas, and the replica of a node is `node + 3 * incarnation`.
 *
 * Simplified, without loss of behaviour:
 *   - A process that is down is one that takes no step. A connection that is cut one way delivers nothing.
 *   - A follower writes, syncs and acknowledges in one step. A crash in between is the loss of the message or of the
 *     answer. A leader that crashes after it has sent an entry and before its own sync is `handle_appended` with a crash.
 *   - Each direction of a connection has at most one message. A second one would wait in FIFO order.
 *   - A holder's key that may end at any time allows every follower to become a candidate at any time.
 *   - A swap of the record takes one step with its answer. A lost answer is a crash, or a read of the record.
 *   - A candidate dials at once. A later dial is a HELLO that arrives later. A message of its former connection that
 *     arrives after the dial has the same effect as before it.
 *   - A crash of a replica without connections and tasks changes nothing, so it is left out.
 *   - A value that no step reads within the bounds is not kept (promised_to, record_leader).
 * Left out: segments, retention, data files and clocks. The simulation has them.
 */

#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef ENTRIES
#define ENTRIES 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef WIPES
#define WIPES 0
#endif
#ifndef CHANGES
#define CHANGES 0
#endif
#ifndef HAND_OVERS
#define HAND_OVERS 0
#endif
#ifndef DISCONNECTS
#define DISCONNECTS 0
#endif
#ifndef RESTORES
#define RESTORES 0
#endif
#ifndef BUG
#define BUG 0
#endif
#ifndef REACH
#define REACH 0
#endif

#define UNSYNCED_ACK 1     /* a follower acknowledges what it has not synced */
#define FORGOTTEN_PROMISE 2 /* a crash loses the promise to another replica */
#define ALONE 3            /* a leader commits what only its own disk has */
#define NO_FETCH 4         /* a candidate leads without the longest log */
#define OLDER_EPOCH 5      /* a leader counts an entry of an older epoch */
#define PROMISED_TWICE 6   /* a replica promises one epoch to two replicas */

#define REACHED(n) assert(REACH != n)

#if EPOCHS > 3
#define UNIT 8 /* then at most one entry */
#else
#define UNIT 4
#endif

/* ---- logs */

#define CODE(log, i) (((log) >> (4 * (i))) & 15)
#define EPOCH_AT(log, i) (CODE(log, i) % UNIT)
#define PREFIX(log, length) ((log) & ((1 << (4 * (length))) - 1))
#define LENGTH(log) ((log >> 24) -> 7 : ((log >> 20) -> 6 : ((log >> 16) -> 5 : ((log >> 12) -> 4 : \
                    ((log >> 8) -> 3 : ((log >> 4) -> 2 : ((log) -> 1 : 0)))))))
#define LAST_EPOCH(log) ((log >> 24) -> EPOCH_AT(log, 6) : ((log >> 20) -> EPOCH_AT(log, 5) : \
                        ((log >> 16) -> EPOCH_AT(log, 4) : ((log >> 12) -> EPOCH_AT(log, 3) : \
                        ((log >> 8) -> EPOCH_AT(log, 2) : ((log >> 4) -> EPOCH_AT(log, 1) : EPOCH_AT(log, 0)))))))
#define LOG_ORDER_KEY(log) (8 * LAST_EPOCH(log) + LENGTH(log))
#define MIN(a, b) ((a) < (b) -> (a) : (b))

/* ---- replicas and sets */

#define NEXT ((me + 1) % 3)
#define PREVIOUS ((me + 2) % 3)
#define IS_IN(set, replica) (((set) >> (replica)) & 1)
#define SIZE(set) (IS_IN(set, 0) + IS_IN(set, 1) + IS_IN(set, 2) + IS_IN(set, 3) + IS_IN(set, 4) + IS_IN(set, 5))
#define MAJORITY(set) (SIZE(set) / 2 + 1)
#define MY_REPLICA (me + 3 * incarnation)

#define REPLICA_OF(node) (node + 3 * IS_IN(peers, node + 3))
#define IS_PEER(node) (IS_IN(peers, node) || IS_IN(peers, node + 3))
#define HAS_ACKED(set, node, position) \
    (IS_PEER(node) && IS_IN(set, REPLICA_OF(node)) && acked[node] != NONE && acked[node] >= position)

#define FOLLOWER 0 /* or learner: not in the record */
#define SEALING 1
#define SYNCING 2
#define LEADER 3

/* ---- messages: type, epoch, argument. `out` goes from the node that dialed, `back` to it. */

#define HELLO 1 /* argument: the replica */
#define CUT 2   /* position */
#define DATA 3  /* position and entry */
#define FETCH 4 /* position */
#define PROMISE 1 /* log and incarnation */
#define REFUSE 2
#define ACK 3   /* position */
#define BYTES 4 /* position and entry */

#define NONE 15
#define WITH_ENTRY(position, entry) (16 * (position) + (entry))
#define HAS_PROMISED (1 << 29)
#define INCARNATION 28
#define PROMISED_LOG(node) (promises[node] & ((1 << INCARNATION) - 1))
#define PROMISED_REPLICA(node) (node + 3 * ((promises[node] >> INCARNATION) & 1))
#define CHANNEL(dialer, node) (2 * (dialer) + (node) - ((node) > (dialer)))
#define IS_OPEN(dialer, node) ((open >> CHANNEL(dialer, node)) & 1)

chan out[6] = [1] of { byte, byte, byte };
chan back[6] = [1] of { byte, byte, int };
byte open;

/* Without a restored etcd, an epoch has one candidate. */
#if RESTORES > 0 || BUG == FORGOTTEN_PROMISE
#define NAMES_ITS_REPLICA 1
#else
#define NAMES_ITS_REPLICA 0
#endif
/* Only after these steps a replica reads who leads. */
#define READS_LEADER (WIPES + CHANGES + HAND_OVERS + RESTORES > 0)

/* ---- the record in etcd */

byte record_epoch;
byte record_leader = NONE; /* a replica */
byte record_set = 7;

/* ---- what remains of the bounds, and what no replica knows */

byte entries, crashes, wipes, changes, hand_overs, disconnects, restores;
int committed_log;      /* all that any leader has committed */
byte opened;            /* epochs in which a replica has led, as a mask */

/* Values within one step. */
hidden byte node, type, epoch, end, count, longest;
hidden int argument, other_log;

inline drain(channel) {
    if
    :: len(channel) > 0 -> channel?_, _, _
    :: else
    fi
}

/* I5: committed entries are never cut. */
inline check_cut(at) {
    assert(!(LENGTH(log) > at && LENGTH(committed_log) > at && PREFIX(log, at + 1) == PREFIX(committed_log, at + 1)))
}

/* The greatest epoch that both logs have, and in it the smaller end: `end`. */
inline find_resume_position(mine, others) {
    end = 0;
    epoch = EPOCHS;
    do
    :: epoch == 0 -> break
    :: else ->
        find_end(mine, epoch, end);
        find_end(others, epoch, count);
        if
        :: end && count -> end = MIN(end, count); break
        :: else -> end = 0; epoch--
        fi
    od
}

inline find_end(log_, epoch_, found) {
    found = LENGTH(log_);
    do
    :: found == 0 -> break
    :: else ->
        if
        :: EPOCH_AT(log_, found - 1) == epoch_ -> break
        :: else -> found--
        fi
    od
}

/* ---- the end of a process, and of a candidacy */

inline hang_up() {
    open = open & ~((1 << CHANNEL(me, NEXT)) | (1 << CHANNEL(me, PREVIOUS)));
    drain(back[CHANNEL(me, NEXT)]);
    drain(back[CHANNEL(me, PREVIOUS)]);
    role = FOLLOWER;
    matched = 0;
    fetching = NONE;
    replicas = 0;
    joining = 0;
    is_proposed = 0;
    committed = 0;
    peers = 0;
    acked[0] = 0; acked[1] = 0; acked[2] = 0;
    sent[0] = 0; sent[1] = 0; sent[2] = 0;
    promises[0] = 0; promises[1] = 0; promises[2] = 0
}

inline give_up() { hang_up() }

inline stop_leading() {
    hang_up();
    open = open & ~((1 << CHANNEL(NEXT, me)) | (1 << CHANNEL(PREVIOUS, me)));
    drain(out[CHANNEL(NEXT, me)]);
    drain(out[CHANNEL(PREVIOUS, me)])
}

inline crash() {
    crashes++;
    stop_leading();
#if BUG == UNSYNCED_ACK
    log = PREFIX(log, synced)
#elif BUG == FORGOTTEN_PROMISE
    promised = (promised_to == MY_REPLICA -> promised : 0)
#else
    skip
#endif
}

inline note_synced() {
#if BUG == UNSYNCED_ACK
    synced = LENGTH(log)
#else
    skip /* all that is written is synced */
#endif
}

/* ---- election */

inline start_sealing() {
    role = SEALING;
    promised = record_epoch;
    promised_to = (NAMES_ITS_REPLICA -> MY_REPLICA : 0);
    replicas = record_set;
    matched = 0;
    note_synced();
    send_hello(NEXT);
    send_hello(PREVIOUS)
}

inline has_majority(found) {
    found = IS_IN(replicas, MY_REPLICA);
    found = found + (promises[NEXT] != 0 && IS_IN(replicas, PROMISED_REPLICA(NEXT)));
    found = found + (promises[PREVIOUS] != 0 && IS_IN(replicas, PROMISED_REPLICA(PREVIOUS)));
    found = (found >= MAJORITY(replicas))
}

inline find_longest_log() {
    longest = NONE;
    other_log = log;
    if
    :: promises[NEXT] && IS_IN(replicas, PROMISED_REPLICA(NEXT)) &&
       LOG_ORDER_KEY(PROMISED_LOG(NEXT)) > LOG_ORDER_KEY(other_log) ->
        longest = NEXT;
        other_log = PROMISED_LOG(NEXT)
    :: else
    fi;
    if
    :: promises[PREVIOUS] && IS_IN(replicas, PROMISED_REPLICA(PREVIOUS)) &&
       LOG_ORDER_KEY(PROMISED_LOG(PREVIOUS)) > LOG_ORDER_KEY(other_log) ->
        longest = PREVIOUS;
        other_log = PROMISED_LOG(PREVIOUS)
    :: else
    fi
}

inline continue_election() {
    has_majority(count);
    if
    :: count ->
        find_longest_log();
        if
        :: longest == NONE || BUG == NO_FETCH -> open_epoch()
        :: else ->
            find_resume_position(other_log, log);
            check_cut(end);
            log = PREFIX(log, end);
            fetching = longest;
            send_fetch()
        fi
    :: else
    fi
}

inline send_fetch() {
    if
    :: IS_OPEN(me, fetching) -> out[CHANNEL(me, fetching)]!FETCH, promised, LENGTH(log)
    :: else
    fi
}

inline open_epoch() {
    assert(!((opened >> promised) & 1)); /* I1 */
    opened = opened | (1 << promised);
    role = SYNCING;
    send_cut(NEXT, PROMISED_LOG(NEXT), promises[NEXT] != 0, PROMISED_REPLICA(NEXT));
    send_cut(PREVIOUS, PROMISED_LOG(PREVIOUS), promises[PREVIOUS] != 0, PROMISED_REPLICA(PREVIOUS));
    promises[0] = 0; promises[1] = 0; promises[2] = 0;
    log = log | (promised << (4 * LENGTH(log)));
    note_synced();
    advance_commit()
}

/* leading.handle_promise */
inline send_cut(to, promised_log, has_promised, replica) {
    if
    :: has_promised ->
        other_log = promised_log;
        peers = peers | (1 << (replica));
        find_resume_position(log, other_log);
        sent[to] = end;
        acked[to] = NONE;
        if
        :: IS_OPEN(me, to) -> out[CHANNEL(me, to)]!CUT, promised, end
        :: else
        fi
    :: else
    fi
}

/* ---- leading */

/* Whether a majority of the set has the log up to `position` on disk: `found`. */
inline find_quorum(set, position, found) {
    found = IS_IN(set, MY_REPLICA);
    found = found + HAS_ACKED(set, NEXT, position) + HAS_ACKED(set, PREVIOUS, position);
    found = (found >= MAJORITY(set) || BUG == ALONE)
}

inline advance_commit() {
    end = LENGTH(log);
    do
    :: end <= committed -> break
    :: else ->
        find_quorum(replicas, end, count);
        if
        :: count && joining -> find_quorum(joining, end, count)
        :: else
        fi;
        if
        :: count -> break
        :: else -> end--
        fi
    od;
    if
    :: end > committed && (BUG == OLDER_EPOCH || EPOCH_AT(log, end - 1) == promised) -> commit(end)
    :: else
    fi
}

/* I4, I6: all leaders commit the same log. */
inline commit(position) {
    committed = position;
    if
    :: LENGTH(committed_log) > position -> assert(PREFIX(committed_log, position) == PREFIX(log, position))
    :: else ->
        assert(PREFIX(log, LENGTH(committed_log)) == committed_log);
        committed_log = PREFIX(log, position)
    fi;
    if
    :: role == SYNCING ->
        role = LEADER;
        /* I6, I7: it has all that was committed, unless a later epoch has committed more. */
        assert(LAST_EPOCH(committed_log) > promised ||
               PREFIX(log, LENGTH(committed_log)) == committed_log);
        if
        :: promised == EPOCHS -> REACHED(1)
        :: else
        fi
    :: else
    fi
}

inline ship_next(to) {
    if
    :: IS_PEER(to) && IS_OPEN(me, to) && acked[to] == sent[to] && sent[to] < LENGTH(log) && len(out[CHANNEL(me, to)]) == 0 ->
        out[CHANNEL(me, to)]!DATA, promised, WITH_ENTRY(sent[to], CODE(log, sent[to]));
        sent[to]++
    :: else
    fi
}

inline send_entry(to, entry) {
    if
    :: IS_PEER(to) && IS_OPEN(me, to) && sent[to] == LENGTH(log) && len(out[CHANNEL(me, to)]) == 0 ->
        out[CHANNEL(me, to)]!DATA, promised, WITH_ENTRY(sent[to], entry);
        sent[to]++
    :: else
    fi
}

inline handle_appended() {
    entries++;
    send_entry(NEXT, promised + UNIT * entries);
    send_entry(PREVIOUS, promised + UNIT * entries)
}

#define MAY_APPEND (role == LEADER && entries < ENTRIES && committed == LENGTH(log))

/* ---- following: messages of a node that has dialed */

inline answer(kind, epoch_, argument_) {
    if
    :: IS_OPEN(node, me) -> back[CHANNEL(node, me)]!kind, epoch_, argument_
    :: else
    fi
}

inline receive() {
    out[CHANNEL(node, me)]?type, epoch, argument;
    if
    :: epoch < promised -> answer(REFUSE, promised, 0)
    :: type == HELLO && epoch > promised && role >= SYNCING -> stop_leading()
    :: type == HELLO && epoch == promised && argument != promised_to && NAMES_ITS_REPLICA && BUG != PROMISED_TWICE -> answer(REFUSE, promised, 0)
    :: type == HELLO && epoch >= promised && !(epoch > promised && role >= SYNCING) &&
       !(epoch == promised && argument != promised_to && NAMES_ITS_REPLICA && BUG != PROMISED_TWICE) -> handle_hello()
    :: type != HELLO && epoch > promised /* no HELLO on this connection since the start */
    :: type != HELLO && epoch == promised ->
        if
        :: type == CUT -> handle_cut()
        :: type == DATA -> write()
        :: type == FETCH -> answer(BYTES, promised, WITH_ENTRY(argument, CODE(log, argument)))
        fi
    fi
}

inline handle_hello() {
    if
    :: role == SEALING -> give_up()
    :: else
    fi;
    promised = epoch;
    promised_to = (NAMES_ITS_REPLICA -> argument : 0);
    matched = 0;
    answer(PROMISE, promised, log | (incarnation << INCARNATION) | HAS_PROMISED)
}

inline handle_cut() {
    assert(argument <= LENGTH(log));
    check_cut(argument);
    log = PREFIX(log, argument);
    note_synced();
    matched = 1;
    answer(ACK, promised, argument)
}

inline write() {
    assert(matched && argument / 16 == LENGTH(log));
    log = log | ((argument % 16) << (4 * LENGTH(log)));
    answer(ACK, promised, LENGTH(log))
}

#define MAY_RECEIVE(from) (len(out[CHANNEL(from, me)]) > 0 && len(back[CHANNEL(from, me)]) == 0)

/* ---- answers to a candidate or a leader */

inline handle_answer() {
    back[CHANNEL(me, node)]?type, epoch, argument;
    if
    :: type == REFUSE && epoch < promised
    :: type == REFUSE && epoch >= promised && role >= SYNCING -> stop_leading()
    :: type == REFUSE && epoch >= promised && role == SEALING -> give_up()
    :: type == PROMISE && role == SEALING ->
        promises[node] = argument;
        if
        :: fetching == NONE -> continue_election()
        :: else
        fi
    :: type == PROMISE && role >= SYNCING ->
        other_log = argument & ((1 << INCARNATION) - 1);
        send_cut(node, other_log, true, node + 3 * ((argument >> INCARNATION) & 1))
    :: type == ACK && role >= SYNCING -> handle_ack()
    :: type == BYTES && role == SEALING -> handle_fetched()
    fi
}

inline handle_ack() {
    acked[node] = argument;
    advance_commit();
    ship_next(node)
}

inline handle_fetched() {
    if
    :: fetching == node ->
        assert(argument / 16 == LENGTH(log));
        log = log | ((argument % 16) << (4 * LENGTH(log)));
        if
        :: LOG_ORDER_KEY(log) < LOG_ORDER_KEY(PROMISED_LOG(node)) -> send_fetch()
        :: else ->
            fetching = NONE;
            note_synced();
            REACHED(2);
            continue_election()
        fi
    :: else
    fi
}

/* ---- connections */

#define MAY_CONNECT(to) (role >= SEALING && !IS_OPEN(me, to))

inline send_hello(to) {
    drain(out[CHANNEL(me, to)]);
    drain(back[CHANNEL(me, to)]);
    open = open | (1 << CHANNEL(me, to));
    out[CHANNEL(me, to)]!HELLO, promised, MY_REPLICA
}

/* A connection has ended, and is opened again. */
inline connect() {
    if
    :: role == SEALING && fetching == node -> give_up()
    :: else ->
        promises[node] = 0;
        peers = peers & ~((1 << node) | (1 << (node + 3)));
        acked[node] = 0;
        sent[node] = 0;
        if
        :: !is_proposed && (IS_IN(joining, node) || IS_IN(joining, node + 3)) -> joining = 0
        :: else
        fi;
        send_hello(node)
    fi
}

/* ---- another set, and a hand-over */

#define LEADS_UNDISPUTED (role == LEADER && !is_proposed && record_epoch == promised && record_leader == MY_REPLICA)
#define HAS_CAUGHT_UP(node) (IS_PEER(node) && acked[node] != NONE && acked[node] >= committed)
/* A new incarnation replaces that of the record. */
#define MAY_REPLACE(node) (role == LEADER && !is_proposed && !joining && HAS_CAUGHT_UP(node) && \
                           IS_IN(peers, node + 3) && IS_IN(replicas, node))
#define MAY_REMOVE(node) (changes < CHANGES && role == LEADER && !is_proposed && !joining && SIZE(replicas) == 3 && \
                          (IS_IN(replicas, node) || IS_IN(replicas, node + 3)))
#define MAY_ADD(node) (role == LEADER && !is_proposed && !joining && SIZE(replicas) == 2 && \
                       !IS_IN(replicas, node) && !IS_IN(replicas, node + 3) && HAS_CAUGHT_UP(node))
#define MAY_HAND_OVER(node) (hand_overs < HAND_OVERS && record_epoch < EPOCHS && LEADS_UNDISPUTED && !joining && \
                             IS_PEER(node) && IS_IN(replicas, REPLICA_OF(node)) && acked[node] == LENGTH(log) && \
                             committed == LENGTH(log))

inline propose() {
    find_quorum(joining, committed, count);
    if
    :: count -> record_set = joining; is_proposed = 1
    :: else
    fi
}

/* machine._store_record */
inline adopt() {
    replicas = joining;
    joining = 0;
    is_proposed = 0;
    if
    :: replicas > 7 -> REACHED(3)
    :: SIZE(replicas) == 2 -> REACHED(4)
    :: else
    fi
}

inline hand_over() {
    hand_overs++;
    record_epoch++;
    record_leader = REPLICA_OF(node);
    stop_leading()
}

/* One of both other nodes for which the condition holds. */
#define ANY(CONDITION) \
    (CONDITION(NEXT) || CONDITION(PREVIOUS)); \
    if \
    :: CONDITION(NEXT) -> node = NEXT \
    :: CONDITION(PREVIOUS) -> node = PREVIOUS \
    fi

#define HAS_ANSWER(from) (len(back[CHANNEL(me, from)]) > 0)
#define MAY_DISCONNECT(to) (disconnects < DISCONNECTS && IS_OPEN(me, to))

proctype replica(byte me) {
    byte role, promised, promised_to, incarnation;
    bit matched, is_proposed;
    int log;
    byte fetching = NONE;
    byte replicas, joining, committed, peers;
    byte acked[3], sent[3];
    int promises[3];
#if BUG == UNSYNCED_ACK
    byte synced;
#endif

end_of_steps:
    do
    :: atomic { ANY(MAY_RECEIVE); d_step { receive() } }
    :: atomic { ANY(HAS_ANSWER); d_step { handle_answer() } }
    :: atomic { ANY(MAY_CONNECT); d_step { connect() } }
    :: d_step { MAY_APPEND ->
            handle_appended();
            log = log | ((promised + UNIT * entries) << (4 * LENGTH(log)));
            note_synced();
            advance_commit()
        }
    :: d_step { MAY_APPEND && crashes < CRASHES ->
            handle_appended(); /* the crash comes before the leader's own write */
            crash()
        }
    :: d_step { role == FOLLOWER && record_epoch < EPOCHS && record_epoch >= promised && IS_IN(record_set, MY_REPLICA) ->
            record_epoch++; /* become_candidate */
            record_leader = (READS_LEADER -> MY_REPLICA : NONE);
            start_sealing()
        }
    :: d_step { role == FOLLOWER && record_leader == MY_REPLICA && record_epoch > promised ->
            start_sealing(); /* handle_seen, after a hand-over */
            REACHED(5)
        }
    :: d_step { role == SEALING && record_epoch > promised -> give_up() } /* handle_seen */
    :: d_step { role >= SYNCING && record_epoch > promised -> stop_leading() } /* handle_seen */
    :: d_step { crashes < CRASHES && (BUG || role != FOLLOWER || matched || IS_OPEN(NEXT, me) || IS_OPEN(PREVIOUS, me) ||
                                      len(out[CHANNEL(NEXT, me)]) + len(out[CHANNEL(PREVIOUS, me)]) > 0) -> crash() }
#if WIPES > 0
    :: d_step { wipes < WIPES && incarnation == 0 ->
            wipes++;
            stop_leading();
            log = 0;
            promised = 0;
            promised_to = 0;
            incarnation = 1;
            note_synced()
        }
    :: atomic { ANY(MAY_REPLACE); d_step { joining = (replicas & ~(1 << node)) | (1 << (node + 3)) } }
#endif
#if CHANGES > 0
    :: atomic { ANY(MAY_REMOVE);
            d_step { changes++; joining = replicas & ~((1 << node) | (1 << (node + 3))) } }
    :: atomic { ANY(MAY_ADD); d_step { joining = replicas | (1 << REPLICA_OF(node)) } }
#endif
#if WIPES + CHANGES > 0
    :: d_step { LEADS_UNDISPUTED && joining -> propose() }
    :: d_step { is_proposed -> adopt() }
#endif
#if HAND_OVERS > 0
    :: atomic { ANY(MAY_HAND_OVER); d_step { hand_over() } }
#endif
#if RESTORES > 0
    :: d_step { restores < RESTORES && record_epoch > 0 ->
            restores++; /* etcd has the copy from before the last election */
            record_epoch--;
            record_leader = NONE
        }
#endif
#if DISCONNECTS > 0
    :: atomic { ANY(MAY_DISCONNECT); d_step { disconnects++; open = open & ~(1 << CHANNEL(me, node)) } }
#endif
    od
}

init {
    atomic { run replica(0); run replica(1); run replica(2) }
}
