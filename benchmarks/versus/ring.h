/* A ring of encoded requests, read from a file, and the fields of headers that a load generator reads.

   The file holds frames of RocketMQ's wire with JSON headers, one behind the other; the n-th bears the opaque n + 1. */

#ifndef RING_H
#define RING_H

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define STAMP "9999999999999" /* an instant is written over it, in milliseconds since 1970 */
#define STAMP_BYTES 13
#define STAMPS_MAX 4

struct frame {
    uint8_t *begin, *end;
    uint8_t *stamps[STAMPS_MAX];
};

static struct frame *frames; /* twice the ring, so that a slice never wraps */
static long count;

static void die(int status, const char *text)
{
    fprintf(stderr, "load: %s\n", text);
    exit(status);
}

static uint32_t int32_at(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void *room(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        die(2, "out of memory");
    return p;
}

/* The number behind a key of a JSON header, -1 when there is none. Quotes within a value are escaped, so no value
   looks like a key. */
static long field(const uint8_t *header, size_t bytes, const char *key, size_t key_bytes)
{
    const uint8_t *p = memmem(header, bytes, key, key_bytes), *end = header + bytes;
    long value = 0;
    if (!p)
        return -1;
    for (p += key_bytes; p < end && *p == ' '; p++)
        ;
    if (p == end || *p < '0' || *p > '9')
        return -1;
    for (; p < end && *p >= '0' && *p <= '9'; p++)
        value = value * 10 + (*p - '0');
    return value;
}
#define FIELD(header, bytes, key) field(header, bytes, "\"" key "\":", sizeof(key) + 2)

static void find_stamps(struct frame *f, int wanted)
{
    uint8_t *p = f->begin;
    int n = 0;
    while (n < STAMPS_MAX && (p = memmem(p, (size_t)(f->end - p), STAMP, STAMP_BYTES))) {
        f->stamps[n++] = p;
        p += STAMP_BYTES;
    }
    if (wanted && !n)
        die(2, "stamp= is given, and a frame has no " STAMP);
}

/* `stamps`: each frame must have a place for an instant. */
static void read_ring(const char *file, int stamps)
{
    struct stat info;
    int fd = open(file, O_RDONLY);
    if (fd < 0 || fstat(fd, &info))
        die(2, "cannot read the file of frames");
    size_t bytes = (size_t)info.st_size, got = 0;
    uint8_t *data = room(2 * bytes + 1);
    while (got < bytes) {
        ssize_t n = read(fd, data + got, bytes - got);
        if (n <= 0)
            die(2, "cannot read the file of frames");
        got += (size_t)n;
    }
    close(fd);
    memcpy(data + bytes, data, bytes);
    for (size_t at = 0; at < bytes; at += 4 + int32_at(data + at))
        count++;
    if (!count)
        die(2, "the file of frames is empty");
    frames = room(2 * (size_t)count * sizeof *frames);
    uint8_t *p = data;
    for (long i = 0; i < 2 * count; i++) {
        frames[i].begin = p;
        frames[i].end = p += 4 + int32_at(p);
        if (p > data + 2 * bytes || frames[i].begin[4])
            die(2, "the file does not hold frames with JSON headers");
        if (FIELD(frames[i].begin + 8, int32_at(frames[i].begin + 4), "opaque") != i % count + 1)
            die(2, "the n-th frame must bear the opaque n + 1");
        find_stamps(&frames[i], stamps);
    }
}

#endif
