# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Encode runs of sends as rows of the log, in C: the compiled counterpart of `small_batch.log_rows` and `build_rows`.

    runs -> assign: a queue and an offset for each row -> the Arrow message of their frame
                                                       -> entries for the queues' indexes

No Python object is created per row or column, so a commit has little overhead, with few rows or many. If one of the
runs has a send with a delay level, or to a dead-letter topic (these messages are counted), the whole batch is left to
the code for rows and columns.
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
    ENTRY_BYTES = 20  # of an entry in a queue's index: queue_entry.ENTRY
    PENDING = -1  # slot of a scheduled message, which has no queue position yet
    KIND = 64  # columns of the log in addition to those of send_columns
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


cdef struct Slot:  # a queue that gets rows of this frame
    int topic
    int32_t queue_id
    int64_t next_offset, rows, size_bytes


cdef struct Position:  # queue and offset of a row
    int32_t slot, queue_id
    int64_t offset, tag
    int32_t size_bytes


cdef class Topics:
    """The topics of some runs, and the queue positions that their rows have taken."""

    cdef dict known, numbers
    cdef object tag_number
    cdef list topics
    cdef list slot_numbers  # per topic: for each queue, its slot number plus 1, as 32 bits. 0: no slot
    cdef list turns  # per topic: the queue of the next row without a queue id, number of queues, whether used
    cdef Slot* slots
    cdef int count, capacity

    def __init__(self, dict known, tag_number):
        self.known, self.numbers, self.tag_number = known, {}, tag_number
        self.topics, self.slot_numbers, self.turns = [], [], []

    def __dealloc__(self):
        free(self.slots)

    cdef int number(self, str name) except -1:
        """Return the number of a topic within these runs, and register it at its first use."""
        found = self.numbers.get(name)
        if found is None:
            topic, found = self.known[name], len(self.topics)
            self.numbers[name] = found
            self.topics.append(topic)
            self.slot_numbers.append(bytearray(4 * len(topic.queues)))
            self.turns.append([topic.turn, topic.write_queues or len(topic.queues), False])
        return found

    cdef int32_t next_queue(self, int topic) except -1:
        """Choose the queue of a row without a queue id: the queues of a topic take turns."""
        cdef list turn = self.turns[topic]
        cdef int64_t queue_id = turn[0] % turn[1]
        turn[0], turn[2] = (queue_id + 1) % turn[1], True
        return <int32_t> queue_id

    cdef int slot(self, int topic, int32_t* queue_id) except -1:
        """Return the slot number of a queue. A queue id beyond the topic's queues is replaced by one within."""
        cdef bytearray held = self.slot_numbers[topic]
        cdef int32_t* numbers = <int32_t*> PyByteArray_AsString(held)
        cdef Slot* slots
        queue_id[0] %= <int32_t> (len(held) // 4)
        if numbers[queue_id[0]] == 0:
            if self.count == self.capacity:
                slots = <Slot*> realloc(self.slots, (2 * self.capacity + 8) * sizeof(Slot))
                if slots == NULL:
                    raise MemoryError
                self.slots, self.capacity = slots, 2 * self.capacity + 8
            next_offset = self.topics[topic].queues[queue_id[0]].next_offset
            self.slots[self.count] = Slot(topic, queue_id[0], next_offset, 0, 0)
            self.count += 1
            numbers[queue_id[0]] = self.count
        return numbers[queue_id[0]] - 1


cdef class Frame:
    """Encodes the rows of some runs as one frame."""

    cdef list runs
    cdef Topics topics
    cdef Position* positions
    cdef Py_ssize_t count, pending
    cdef int64_t pending_bytes, now_ms
    cdef bytes host

    def __init__(self, list runs, Topics topics, int64_t now_ms, bytes host):
        cdef SendRun run
        self.runs, self.topics, self.now_ms, self.host = runs, topics, now_ms, host
        for run in runs:
            self.count += run.count
        self.positions = <Position*> malloc((self.count or 1) * sizeof(Position))
        if self.positions == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.positions)

    cdef bint assign_positions(self, int64_t last_ms) except -1:
        """Assign queue and offset to each row. False if the code for rows and columns must handle the batch.

        `last_ms` is the latest due time that is allowed.
        """
        cdef SendRun run
        cdef Row* row
        cdef Position* position = self.positions
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
                position.size_bytes = <int32_t> (
                    OVERHEAD_BYTES + run.names[row.topic].size + row.body_bytes + row.text_bytes
                )
                position.queue_id, position.slot, position.offset = row.queue_id, PENDING, 0
                # A scheduled message gets its offset when it is due. It must not take one now.
                if row.due_ms != NEVER:
                    self.pending += 1
                    self.pending_bytes += position.size_bytes
                    position += 1
                    continue
                if row.queue_id < 0:
                    position.queue_id = self.topics.next_queue(topic)
                position.slot = self.topics.slot(topic, &position.queue_id)
                slot = self.topics.slots + position.slot
                position.offset = slot.next_offset + slot.rows
                slot.rows += 1
                slot.size_bytes += position.size_bytes
                tag = text_of(run, row, TAG)
                if tag.size <= 0:
                    position.tag = 0
                else:
                    # Most consecutive rows have the same tag. Looking up its number takes as long as the rest of a row.
                    if topic != last_topic or not same(tag, last_tag.at, last_tag.size):
                        tag_numbers = self.topics.tag_number(self.topics.topics[topic])
                        tag_number = tag_numbers(tag.at[:tag.size].decode())
                        last_tag, last_topic = tag, topic
                    position.tag = tag_number
                position += 1
        return True

    cdef bint measure(self) except -1:
        """Count the nulls and the bytes of each column, and find the columns of zeros. False if a text is too long."""
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
                column.nulls = self.pending
            elif WHICH[at] == DUE_MS:
                column.nulls = self.count - self.pending
            elif WHICH[at] == NOTHING:
                column.nulls = self.count
            column.is_zeros = self.is_zeros(WHICH[at])
        return True

    cdef inline Text text(self, SendRun run, Row* row, int column_id) noexcept:
        """Return a text of a row, with a size of -1 if the row has none."""
        cdef Text store_host
        if column_id == STORE_HOST:
            store_host.at, store_host.size = <const char*> self.host, len(self.host)
            return store_host
        return text_of(run, row, column_id)

    cdef int measure_texts(self, Written* column, int column_id) except -1:
        """Count the nulls and the bytes of a column of texts."""
        cdef SendRun run
        cdef Row* row
        cdef Text text
        for run in self.runs:
            for row in run.rows[:run.count]:
                text = self.text(run, row, column_id)
                if text.size < 0:
                    column.nulls += 1
                else:
                    column.size += text.size
        return 0

    cdef int write_texts(self, Written* column, int column_id) except -1:
        """Write a column of texts into the Arrow message: end offsets, bytes and validity."""
        cdef SendRun run
        cdef Row* row
        cdef Text text
        cdef Py_ssize_t number = 0
        cdef int32_t end = 0
        cdef int32_t* ends = <int32_t*> column.values
        for run in self.runs:
            for row in run.rows[:run.count]:
                text = self.text(run, row, column_id)
                if text.size > 0:
                    memcpy(column.data + end, text.at, text.size)
                    end += <int32_t> text.size
                if column.nulls and text.size >= 0:
                    column.valid[number >> 3] |= 1 << (number & 7)
                number += 1
                ends[number] = end
        return 0

    cdef inline int64_t number(self, Row* row, Position* position, int column_id) noexcept:
        """Return a number of a row, NEVER if the row has none."""
        if column_id == KIND:
            return SCHEDULED if position.slot == PENDING else MESSAGE
        if column_id == QUEUE_ID:
            return position.queue_id
        if column_id == QUEUE_OFFSET:
            return NEVER if position.slot == PENDING else position.offset
        if column_id == STORE_MS:
            return self.now_ms
        return NEVER if column_id == NOTHING else number_of(row, column_id)

    cdef bint is_zeros(self, int column_id) except -1:
        """Return whether all numbers of a column are 0 or missing."""
        cdef SendRun run
        cdef Row* row
        cdef Position* position = self.positions
        cdef int64_t value
        if column_id == NOTHING:
            return True
        for run in self.runs:
            for row in run.rows[:run.count]:
                value = self.number(row, position, column_id)
                if value != 0 and value != NEVER:
                    return False  # in most columns already at the first row
                position += 1
        return True

    cdef int write_numbers(self, Written* column, int column_id) except -1:
        """Write a column of numbers into the Arrow message: values and validity."""
        cdef SendRun run
        cdef Row* row
        cdef Position* position = self.positions
        cdef char* out = column.values
        cdef Py_ssize_t number = 0
        cdef int64_t value
        if column.is_zeros and column.nulls in (0, self.count):
            return 0  # the message is filled with zeros already
        for run in self.runs:
            for row in run.rows[:run.count]:
                value = self.number(row, position, column_id)
                if not column.nulls:
                    memcpy(out, &value, column.width)
                elif value != NEVER:
                    memcpy(out, &value, column.width)
                    column.valid[number >> 3] |= 1 << (number & 7)
                out += column.width
                number += 1
                position += 1
        return 0

    cdef bytes message(self):
        """Encode the Arrow message. `measure` must have been called."""
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
        """Encode the entries for the index of each queue that gets rows.

        Returns a tuple for each queue: topic, queue id, entries, and the size of its rows in bytes. An entry has the
        index of its row in place of the sequence number, which is not assigned yet.
        """
        cdef Py_ssize_t number
        cdef int at
        cdef Position* position
        cdef Slot* slot
        cdef char* to
        cdef char** ends = <char**> malloc((self.topics.count or 1) * sizeof(char*))
        if ends == NULL:
            raise MemoryError
        entries_by_queue = []
        try:
            for at in range(self.topics.count):
                slot = self.topics.slots + at
                held = bytearray(ENTRY_BYTES * slot.rows)
                ends[at] = PyByteArray_AsString(held)
                entries_by_queue.append((self.topics.topics[slot.topic], slot.queue_id, held, slot.size_bytes))
            for number in range(self.count):
                position = self.positions + number
                if position.slot == PENDING:
                    continue
                to = ends[position.slot]
                write32(to + 4, <int32_t> number)
                write32(to + 8, position.size_bytes)
                write32(to + 12, <int32_t> (position.tag >> 32))
                write32(to + 16, <int32_t> position.tag)
                ends[position.slot] = to + ENTRY_BYTES
        finally:
            free(ends)
        return entries_by_queue


def log_rows(
    list runs not None, dict topics not None, tag_number, int64_t now_ms, int64_t last_ms, str host not None
):
    """Encode the rows of these runs as an Arrow message of the log. None if the code for rows and columns must do it.

    `topics` maps names to topics. `tag_number(topic)` returns a function from a tag to its number in the queue index.
    `last_ms` is the latest due time that is allowed. Returns the message, queue id and offset of each row, the result
    of `Frame.entries`, the next queue in turn of each topic that has used one, the row numbers of scheduled messages,
    and the size of these rows in bytes.
    """
    cdef Frame frame = Frame(runs, Topics(topics, tag_number), now_ms, host.encode())
    cdef Py_ssize_t at
    if not frame.assign_positions(last_ms) or not frame.measure():
        return None
    message = frame.message()
    queue_ids, offsets, pending = [], [], []
    for at in range(frame.count):
        queue_ids.append(frame.positions[at].queue_id)
        if frame.positions[at].slot == PENDING:
            offsets.append(None)
            pending.append(at)
        else:
            offsets.append(frame.positions[at].offset)
    turns = {topic: turn[0] for topic, turn in zip(frame.topics.topics, frame.topics.turns) if turn[2]}
    return message, queue_ids, offsets, frame.entries(), turns, pending, frame.pending_bytes
