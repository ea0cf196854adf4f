/* A load generator for RocketMQ's wire that is no bottleneck: frames made beforehand, each answer's code checked.

   Each connection walks its stretch of a ring of encoded requests and keeps a fixed number of them in flight. The n-th
   frame of the ring bears the opaque n + 1, so an answer names its request and latencies are right whatever the order
   of the answers. An answer with another code than 0 is counted as failed; one to no request in flight ends the load.

     load file=FRAMES host=A port=N connections=N in_flight=N seconds=S
          [limit=N]     send N requests in all, none of the ring twice if it holds so many
          [rate=N]      N requests a second in all, in place of as many as are answered
          [rows=N]      messages in a request (1)
          [stored=1]    answers hold stored messages: count them, and fail an answer that holds not `rows` of them
          [stamp=MS]    write the instant MS from now over each 9999999999999 of a request before it is sent

   Prints one JSON object. Exit 2: the arguments or the file are wrong; 3: the server fell silent or hung up, or answers
   what was not asked. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "ring.h"

#define READ_BYTES (1 << 20)
#define SILENCE_S 30
#define CODES 4096

struct options {
    const char *file, *host;
    long port, connections, in_flight, limit, rows, stored, stamp_ms;
    double seconds, rate;
};

struct connection {
    int fd;
    long at;                /* the next frame of the ring */
    long open, sent;        /* requests in flight, and sent in all */
    uint8_t *out, *out_end; /* what the socket has not taken yet: a slice of the ring */
    uint8_t *in;            /* a half answer */
    size_t in_bytes, in_room;
    uint64_t *sent_ns; /* by frame; 0: not in flight */
    int blocked;       /* epoll tells when the socket takes more */
};

static struct options opt = {.connections = 1, .in_flight = 1, .rows = 1, .seconds = 1};
static struct connection *links;
static int polling;
static long answered, failed, messages, codes[CODES];
static double *latency_ms;
static size_t latencies, latency_room;

static uint64_t now_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* ---- requests ------------------------------------------------------------------------------------------------- */

static void flush_out(struct connection *c)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    int blocked = 0;
    while (c->out < c->out_end && !blocked) {
        ssize_t n = send(c->fd, c->out, (size_t)(c->out_end - c->out), MSG_NOSIGNAL);
        blocked = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
        if (n < 0 && !blocked)
            die(3, "the server has closed a connection under load");
        c->out += blocked ? 0 : n;
    }
    if (blocked != c->blocked) {
        event.events |= blocked ? EPOLLOUT : 0;
        epoll_ctl(polling, EPOLL_CTL_MOD, c->fd, &event);
        c->blocked = blocked;
    }
}

static void stamp(struct frame *f)
{
    char text[24];
    snprintf(text, sizeof text, "%013llu",
             (unsigned long long)(now_ns(CLOCK_REALTIME) / 1000000u + (uint64_t)opt.stamp_ms));
    for (int n = 0; n < STAMPS_MAX && f->stamps[n]; n++)
        memcpy(f->stamps[n], text, STAMP_BYTES);
}

/* Send up to `wanted` requests, as far as window and limit let; a slice that the socket has not taken goes first. */
static void send_requests(struct connection *c, long wanted)
{
    if (c->out < c->out_end || wanted <= 0)
        return;
    long share = opt.limit / opt.connections;
    if (wanted > opt.in_flight - c->open)
        wanted = opt.in_flight - c->open;
    if (opt.limit && wanted > share - c->sent)
        wanted = share - c->sent;
    /* One that is answered much later than its neighbours: its opaque must not be in flight twice. */
    for (long i = 0; i < wanted; i++)
        if (c->sent_ns[(c->at + i) % count])
            wanted = i;
    if (wanted <= 0)
        return;
    uint64_t now = now_ns(CLOCK_MONOTONIC);
    for (long i = 0; i < wanted; i++) {
        if (opt.stamp_ms)
            stamp(&frames[c->at + i]);
        c->sent_ns[(c->at + i) % count] = now;
    }
    c->out = frames[c->at].begin;
    c->out_end = frames[c->at + wanted - 1].end;
    c->at = (c->at + wanted) % count;
    c->open += wanted;
    c->sent += wanted;
    flush_out(c);
}

static int all_sent(void)
{
    long share = opt.limit / opt.connections;
    for (long i = 0; opt.limit && i < opt.connections; i++)
        if (links[i].sent < share)
            return 0;
    return opt.limit > 0;
}

/* ---- answers -------------------------------------------------------------------------------------------------- */

static long stored_messages(const uint8_t *body, const uint8_t *end)
{
    long n = 0;
    while (end - body >= 4) {
        uint32_t size = int32_at(body);
        if (size < 4 || size > (size_t)(end - body))
            return -1;
        body += size;
        n++;
    }
    return n;
}

static void take_answer(struct connection *c, const uint8_t *answer, size_t bytes, uint64_t now, int counts)
{
    uint32_t word = bytes >= 8 ? int32_at(answer + 4) : UINT32_MAX, header_bytes = word & 0xFFFFFF;
    if (word >> 24 || header_bytes > bytes - 8)
        die(3, "an answer is no frame with a JSON header");
    long code = FIELD(answer + 8, header_bytes, "code"), opaque = FIELD(answer + 8, header_bytes, "opaque");
    long rows = opt.rows;
    if (opaque < 1 || opaque > count || !c->sent_ns[opaque - 1])
        die(3, "an answer is to no request in flight");
    c->open--;
    answered++;
    if (opt.stored && code == 0)
        rows = stored_messages(answer + 8 + header_bytes, answer + bytes);
    if (code != 0 || rows != opt.rows) {
        failed++;
        codes[code < 0 || code >= CODES ? CODES - 1 : code]++;
    } else {
        messages += rows;
        if (counts) {
            if (latencies == latency_room) {
                latency_room = latency_room ? 2 * latency_room : 1 << 16;
                latency_ms = realloc(latency_ms, latency_room * sizeof *latency_ms);
                if (!latency_ms)
                    die(2, "out of memory");
            }
            latency_ms[latencies++] = (double)(now - c->sent_ns[opaque - 1]) / 1e6;
        }
    }
    c->sent_ns[opaque - 1] = 0;
}

/* Returns how many answers were in what has come. */
static long receive(struct connection *c, int counts)
{
    if (c->in_room - c->in_bytes < READ_BYTES) {
        c->in_room = c->in_bytes + 2 * READ_BYTES;
        if (!(c->in = realloc(c->in, c->in_room)))
            die(2, "out of memory");
    }
    ssize_t n = recv(c->fd, c->in + c->in_bytes, c->in_room - c->in_bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 0;
    if (n <= 0)
        die(3, "the server has closed a connection under load");
    c->in_bytes += (size_t)n;
    uint64_t now = now_ns(CLOCK_MONOTONIC);
    size_t at = 0;
    long done = 0;
    while (c->in_bytes - at >= 4) {
        size_t bytes = 4 + (size_t)int32_at(c->in + at);
        if (bytes > c->in_bytes - at)
            break;
        take_answer(c, c->in + at, bytes, now, counts);
        at += bytes;
        done++;
    }
    memmove(c->in, c->in + at, c->in_bytes - at);
    c->in_bytes -= at;
    return done;
}

/* ---- the load ------------------------------------------------------------------------------------------------- */

static void connect_all(void)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)opt.port)};
    int one = 1, socket_bytes = 4 << 20;
    if (inet_pton(AF_INET, opt.host, &to.sin_addr) != 1)
        die(2, "host= must be an IPv4 address");
    links = room((size_t)opt.connections * sizeof *links);
    polling = epoll_create1(0);
    for (long i = 0; i < opt.connections; i++) {
        struct connection *c = &links[i];
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        c->fd = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &socket_bytes, sizeof socket_bytes);
        if (connect(c->fd, (struct sockaddr *)&to, sizeof to))
            die(3, "cannot connect");
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        c->at = i * count / opt.connections;
        c->sent_ns = room((size_t)count * sizeof *c->sent_ns);
        epoll_ctl(polling, EPOLL_CTL_ADD, c->fd, &event);
    }
}

static long open_requests(void)
{
    long n = 0;
    for (long i = 0; i < opt.connections; i++)
        n += links[i].open;
    return n;
}

/* Requests that are due by now at this rate, spread over the connections in turn. */
static void send_due(uint64_t begun)
{
    static long given;
    long due = (long)((double)(now_ns(CLOCK_MONOTONIC) - begun) / 1e9 * opt.rate);
    for (long tries = 0; given < due && tries < opt.connections; tries++) {
        struct connection *c = &links[given % opt.connections];
        long before = c->sent;
        send_requests(c, 1);
        given++;
        if (c->sent > before)
            tries = 0;
    }
    if (given < due)
        given = due; /* no window is open: what could not be sent is not made up for */
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_outcome(double seconds, double own_cpu_s, long in_time, long messages_in_time)
{
    const char *comma = "";
    qsort(latency_ms, latencies, sizeof *latency_ms, by_value);
    double p50 = latencies ? latency_ms[latencies / 2] : 0, p99 = latencies ? latency_ms[latencies * 99 / 100] : 0;
    printf("{\"seconds\": %.6f, \"answers\": %ld, \"messages\": %ld, \"answered\": %ld, \"delivered\": %ld, ", seconds,
           in_time, messages_in_time, answered, messages);
    printf("\"failures\": %ld, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f, \"cpu_s\": %.4f, \"codes\": {",
           failed, p50, p99, latencies ? latency_ms[latencies - 1] : 0, own_cpu_s);
    for (int i = 0; i < CODES; i++)
        if (codes[i]) {
            printf("%s\"%d\": %ld", comma, i == CODES - 1 ? -1 : i, codes[i]);
            comma = ", ";
        }
    printf("}}\n");
}

static void run(void)
{
    struct epoll_event events[512];
    uint64_t begun = now_ns(CLOCK_MONOTONIC), heard = begun;
    double own = cpu_s(), seconds = 0, own_in_time = 0;
    long in_time = 0, messages_in_time = 0;
    int over = 0;
    for (long i = 0; !opt.rate && i < opt.connections; i++)
        send_requests(&links[i], opt.in_flight);
    while (!over || open_requests()) {
        if (opt.rate && !over)
            send_due(begun);
        int ready = epoll_wait(polling, events, 512, opt.rate ? 1 : 1000);
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT)
                flush_out(c);
            if (!(events[i].events & ~(uint32_t)EPOLLOUT))
                continue;
            if (receive(c, !over))
                heard = now_ns(CLOCK_MONOTONIC);
            if (!over && !opt.rate)
                send_requests(c, opt.in_flight);
        }
        uint64_t now = now_ns(CLOCK_MONOTONIC);
        if (open_requests() && now - heard > SILENCE_S * 1000000000ull)
            die(3, "the server has answered nothing for 30 s");
        if (!over && ((double)(now - begun) / 1e9 >= opt.seconds || (all_sent() && !open_requests()))) {
            /* What comes after is not counted: it is the end of the load, not the load. */
            over = 1;
            seconds = (double)(now - begun) / 1e9;
            own_in_time = cpu_s() - own;
            in_time = answered;
            messages_in_time = messages;
        }
    }
    print_outcome(seconds, own_in_time, in_time, messages_in_time);
}

static void read_options(int argc, char **argv)
{
    struct { const char *name; long *number; } numbers[] = {
        {"port", &opt.port}, {"connections", &opt.connections}, {"in_flight", &opt.in_flight}, {"limit", &opt.limit},
        {"rows", &opt.rows}, {"stored", &opt.stored}, {"stamp", &opt.stamp_ms},
    };
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        int known = 0;
        if (!value)
            die(2, "an argument is not name=value");
        *value++ = 0;
        for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
            if (!strcmp(argv[i], numbers[n].name))
                *numbers[n].number = atol(value), known = 1;
        if (!strcmp(argv[i], "file"))
            opt.file = value, known = 1;
        else if (!strcmp(argv[i], "host"))
            opt.host = value, known = 1;
        else if (!strcmp(argv[i], "seconds"))
            opt.seconds = atof(value), known = 1;
        else if (!strcmp(argv[i], "rate"))
            opt.rate = atof(value), known = 1;
        if (!known)
            die(2, "an argument has an unknown name");
    }
    if (!opt.file || !opt.host || !opt.port || opt.connections < 1 || opt.in_flight < 1)
        die(2, "file=, host= and port= are needed");
    if (opt.limit % opt.connections)
        die(2, "limit= must be a multiple of connections=");
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    read_ring(opt.file, opt.stamp_ms > 0);
    if (opt.in_flight > count)
        die(2, "the ring is shorter than the window");
    connect_all();
    run();
    return 0;
}
