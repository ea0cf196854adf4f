# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Runs of sends as rows of the log, with their places: the compiled twin of `small_batch.log_rows` and of `build_rows`.

    runs -> place: a queue and an offset for each row -> the Arrow message of their frame
                                                      -> entries for the queues' indexes

Neither a row nor a column becomes an object, so a commit costs little beside its rows, few or many. A send for a delay
level, or to a topic of dead letters, which are counted, is left to the way of rows and columns with all beside it.
"""

from cpython.bytearray cimport PyByteArray_AsString
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from timeball.log.arrow_message cimport Column as Written, MessageEncoder
from timeball.edges.remoting.codec.c_text cimport Text, same, write32
from timeball.edges.remoting.codec.send_columns cimport (
    BODY, BORN_HOST, BORN_MS, DUE_MS, FLAG, KEYS, PROPERTIES, SYS_FLAG, TAG, TIMES, TOPIC, UNIQUE_KEY, number_of,
    text_of,
)
from timeball.edges.remoting.codec.send_headers cimport NEVER, Row
from timeball.edges.remoting.codec.send_runs cimport SendRun

from timeball.log.row_encoder import LOG_ENCODER
from timeball.model.message import DLQ_PREFIX, LOG_SCHEMA, STORED_OVERHEAD_BYTES, Kind

cdef enum:
    COLUMNS = 21
    ENTRY_BYTES = 20  # of a queue's index: queue_entry.ENTRY
    WAITS = -1  # in place of a queue that is chosen
    KIND = 64  # columns that no send names, beside those of send_columns
    QUEUE_ID, QUEUE_OFFSET, STORE_MS, STORE_HOST, NOTHING

cdef int64_t TEXT_BYTES_MAX = (1 << 31) - 1
cdef int64_t OVERHEAD_BYTES = STORED_OVERHEAD_BYTES
cdef int MESSAGE = Kind.MESSAGE, SCHEDULED = Kind.SCHEDULED
cdef MessageEncoder ENCODER = LOG_ENCODER
cdef dict _columns = {
    "kind": KIND, "topic": TOPIC, "queue_id": QUEUE_ID, "queue_offset": QUEUE_OFFSET, "tag": TAG, "keys": KEYS,
    "unique_key": UNIQUE_KEY, "body": BODY, "properties": PROPERTIES, "born_ms": BORN_MS, "born_host": BORN_HOST,
    "store_ms": STORE_MS, "store_host": STORE_HOST, "flag": FLAG, "sys_flag": SYS_FLAG, "reconsume_times": TIMES,
    "due_ms": DUE_MS,
}
cdef int WHICH[COLUMNS]
cdef int _at
assert len(LOG_SCHEMA) == COLUMNS
for _at in range(COLUMNS):
    WHICH[_at] = _columns.get(LOG_SCHEMA.names[_at], NOTHING)


cdef struct Slot:  # a queue that gets rows
    int topic
    int32_t queue_id
    int64_t next_offset, rows, size_bytes


cdef struct Place:  # of a row
    int32_t slot, queue_id
    int64_t offset, tag
    int32_t size_bytes


cdef class Topics:
    """The topics of some runs, and what is given out of them."""

    cdef dict known, numbers
    cdef object tag_number
    cdef list topics
    cdef list slot_numbers  # of each topic: for each queue, its slot and one, as 32 bits; 0: it has none
    cdef list turns  # of each topic: the queue for the next row that asks for none, and how many take turns
    cdef Slot* slots
    cdef int count, room

    def __init__(self, dict known, tag_number):
        self.known, self.numbers, self.tag_number = known, {}, tag_number
        self.topics, self.slot_numbers, self.turns = [], [], []

    def __dealloc__(self):
        free(self.slots)

    cdef int number(self, str name) except -1:
        """Return the number of a topic."""
        found = self.numbers.get(name)
        if found is None:
            topic, found = self.known[name], len(self.topics)
            self.numbers[name] = found
            self.topics.append(topic)
            self.slot_numbers.append(bytearray(4 * len(topic.queues)))
            self.turns.append([topic.turn, topic.write_queues or len(topic.queues), False])
        return found

    cdef int32_t next_queue(self, int topic) except -1:
        """Return the queue whose turn it is."""
        cdef list turn = self.turns[topic]
        cdef int64_t queue_id = turn[0] % turn[1]
        turn[0], turn[2] = (queue_id + 1) % turn[1], True
        return <int32_t> queue_id

    cdef int slot(self, int topic, int32_t* queue_id) except -1:
        """Return the slot of a queue; one that is no more gives its rows to another."""
        cdef bytearray held = self.slot_numbers[topic]
        cdef int32_t* numbers = <int32_t*> PyByteArray_AsString(held)
        cdef Slot* slots
        queue_id[0] %= <int32_t> (len(held) // 4)
        if numbers[queue_id[0]] == 0:
            if self.count == self.room:
                slots = <Slot*> realloc(self.slots, (2 * self.room + 8) * sizeof(Slot))
                if slots == NULL:
                    raise MemoryError
                self.slots, self.room = slots, 2 * self.room + 8
            next_offset = self.topics[topic].queues[queue_id[0]].next_offset
            self.slots[self.count] = Slot(topic, queue_id[0], next_offset, 0, 0)
            self.count += 1
            numbers[queue_id[0]] = self.count
        return numbers[queue_id[0]] - 1


cdef class Frame:
    """Rows of some runs on their way into one frame."""

    cdef list runs
    cdef Topics topics
    cdef Place* places
    cdef Py_ssize_t count, waiting
    cdef int64_t waiting_bytes, now_ms
    cdef bytes host

    def __init__(self, list runs, Topics topics, int64_t now_ms, bytes host):
        cdef SendRun run
        self.runs, self.topics, self.now_ms, self.host = runs, topics, now_ms, host
        for run in runs:
            self.count += run.count
        self.places = <Place*> malloc((self.count or 1) * sizeof(Place))
        if self.places == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.places)

    cdef bint place(self, int64_t last_ms) except -1:
        """Give each row its place; False when one of them goes another way."""
        cdef SendRun run
        cdef Row* row
        cdef Place* place = self.places
        cdef Slot* slot
        cdef Text tag, last_tag
        cdef int topic, last_topic = -1
        cdef int64_t tag_number = 0
        last_tag.at, last_tag.size = NULL, -1
        for run in self.runs:
            for name, _ in run.destinations:
                if name.startswith(DLQ_PREFIX):
                    return False
            numbers = [self.topics.number(name) for name, _ in run.destinations]
            for row in run.rows[:run.count]:
                topic = numbers[row.topic]
                if row.level or (row.due_ms != NEVER and not 0 <= row.due_ms <= last_ms):
                    return False
                place.size_bytes = <int32_t> (
                    OVERHEAD_BYTES + run.names[row.topic].size + row.body_bytes + row.text_bytes
                )
                place.queue_id, place.slot, place.offset = row.queue_id, WAITS, 0
                # What waits gets its place when it comes due: it must not use up an offset of its topic.
                if row.due_ms != NEVER:
                    self.waiting += 1
                    self.waiting_bytes += place.size_bytes
                    place += 1
                    continue
                if row.queue_id < 0:
                    place.queue_id = self.topics.next_queue(topic)
                place.slot = self.topics.slot(topic, &place.queue_id)
                slot = self.topics.slots + place.slot
                place.offset = slot.next_offset + slot.rows
                slot.rows += 1
                slot.size_bytes += place.size_bytes
                tag = text_of(run, row, TAG)
                if tag.size <= 0:
                    place.tag = 0
                else:
                    # Neighbours mostly have one tag: to ask for its number costs as much as the rest of a row.
                    if topic != last_topic or not same(tag, last_tag.at, last_tag.size):
                        of_tag = self.topics.tag_number(self.topics.topics[topic])
                        tag_number = of_tag(tag.at[:tag.size].decode())
                        last_tag, last_topic = tag, topic
                    place.tag = tag_number
                place += 1
        return True

    cdef bint measure(self) except -1:
        """Measure the columns; False when a text column is too long."""
        cdef int at
        cdef Written* column
        for at in range(COLUMNS):
            column = ENCODER.column + at
            column.nulls = column.size = 0
            if column.width < 0:
                self.measure_texts(column, WHICH[at])
                if column.size > TEXT_BYTES_MAX:
                    return False
                continue
            if WHICH[at] == QUEUE_OFFSET:
                column.nulls = self.waiting
            elif WHICH[at] == DUE_MS:
                column.nulls = self.count - self.waiting
            elif WHICH[at] == NOTHING:
                column.nulls = self.count
            column.is_zeros = self.is_zeros(WHICH[at])
        return True

    cdef inline Text text(self, SendRun run, Row* row, int which) noexcept:
        cdef Text found
        if which == STORE_HOST:
            found.at, found.size = <const char*> self.host, len(self.host)
            return found
        return text_of(run, row, which)

    cdef int measure_texts(self, Written* column, int which) except -1:
        cdef SendRun run
        cdef Row* row
        cdef Text text
        for run in self.runs:
            for row in run.rows[:run.count]:
                text = self.text(run, row, which)
                if text.size < 0:
                    column.nulls += 1
                else:
                    column.size += text.size
        return 0

    cdef int write_texts(self, Written* column, int which) except -1:
        cdef SendRun run
        cdef Row* row
        cdef Text text
        cdef Py_ssize_t number = 0
        cdef int32_t end = 0
        cdef int32_t* ends = <int32_t*> column.values
        for run in self.runs:
            for row in run.rows[:run.count]:
                text = self.text(run, row, which)
                if text.size > 0:
                    memcpy(column.data + end, text.at, text.size)
                    end += <int32_t> text.size
                if column.nulls and text.size >= 0:
                    column.valid[number >> 3] |= 1 << (number & 7)
                number += 1
                ends[number] = end
        return 0

    cdef inline int64_t number(self, Row* row, Place* place, int which) noexcept:
        """Return a number of a row; NEVER for one that is missing."""
        if which == KIND:
            return SCHEDULED if place.slot == WAITS else MESSAGE
        if which == QUEUE_ID:
            return place.queue_id
        if which == QUEUE_OFFSET:
            return NEVER if place.slot == WAITS else place.offset
        if which == STORE_MS:
            return self.now_ms
        return NEVER if which == NOTHING else number_of(row, which)

    cdef bint is_zeros(self, int which) except -1:
        """Return whether a number is 0 or missing in all rows."""
        cdef SendRun run
        cdef Row* row
        cdef Place* place = self.places
        cdef int64_t value
        if which == NOTHING:
            return True
        for run in self.runs:
            for row in run.rows[:run.count]:
                value = self.number(row, place, which)
                if value != 0 and value != NEVER:
                    return False  # mostly of the first row
                place += 1
        return True

    cdef int write_numbers(self, Written* column, int which) except -1:
        cdef SendRun run
        cdef Row* row
        cdef Place* place = self.places
        cdef char* out = column.values
        cdef Py_ssize_t number = 0
        cdef int64_t value
        if column.is_zeros and column.nulls in (0, self.count):
            return 0  # the message is all zero
        for run in self.runs:
            for row in run.rows[:run.count]:
                value = self.number(row, place, which)
                if not column.nulls:
                    memcpy(out, &value, column.width)
                elif value != NEVER:
                    memcpy(out, &value, column.width)
                    column.valid[number >> 3] |= 1 << (number & 7)
                out += column.width
                number += 1
                place += 1
        return 0

    cdef bytes message(self):
        """Return the Arrow message, once it has been measured."""
        cdef int at
        cdef Written* column
        message = ENCODER.lay_out(self.count)
        for at in range(COLUMNS):
            column = ENCODER.column + at
            if column.width < 0:
                self.write_texts(column, WHICH[at])
            else:
                self.write_numbers(column, WHICH[at])
        return message

    cdef list entries(self):
        """Return of each queue that gets rows: topic, number, entries whose rows count from 0, bytes."""
        cdef Py_ssize_t number
        cdef int at
        cdef Place* place
        cdef Slot* slot
        cdef char* to
        cdef char** ends = <char**> malloc((self.topics.count or 1) * sizeof(char*))
        if ends == NULL:
            raise MemoryError
        found = []
        try:
            for at in range(self.topics.count):
                slot = self.topics.slots + at
                held = bytearray(ENTRY_BYTES * slot.rows)
                ends[at] = PyByteArray_AsString(held)
                found.append((self.topics.topics[slot.topic], slot.queue_id, held, slot.size_bytes))
            for number in range(self.count):
                place = self.places + number
                if place.slot == WAITS:
                    continue
                to = ends[place.slot]
                write32(to + 4, <int32_t> number)
                write32(to + 8, place.size_bytes)
                write32(to + 12, <int32_t> (place.tag >> 32))
                write32(to + 16, <int32_t> place.tag)
                ends[place.slot] = to + ENTRY_BYTES
        finally:
            free(ends)
        return found


def log_rows(
    list runs not None, dict topics not None, tag_number, int64_t now_ms, int64_t last_ms, str host not None
):
    """Return the rows of these runs as an Arrow message of the log, with their places; None when one goes another way.

    `topics` are those of all names; `tag_number` returns what makes the index's number of a tag of one of them.
    `last_ms`: the latest instant for which a send may wait. Beside the message: queue and offset of each row; what
    `Frame.entries` returns; the next turn of each topic that has had one; the positions of the rows that wait, and
    their bytes.
    """
    cdef Frame frame = Frame(runs, Topics(topics, tag_number), now_ms, host.encode())
    cdef Py_ssize_t at
    if not frame.place(last_ms) or not frame.measure():
        return None
    message = frame.message()
    queue_ids, offsets, waiting = [], [], []
    for at in range(frame.count):
        queue_ids.append(frame.places[at].queue_id)
        if frame.places[at].slot == WAITS:
            offsets.append(None)
            waiting.append(at)
        else:
            offsets.append(frame.places[at].offset)
    turns = {topic: turn[0] for topic, turn in zip(frame.topics.topics, frame.topics.turns) if turn[2]}
    return message, queue_ids, offsets, frame.entries(), turns, waiting, frame.waiting_bytes
