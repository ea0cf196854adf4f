import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/**
 * The stock Java client as a load: threads that send and wait, or a push consumer of a backlog.
 *
 * <p>produce NAME_SERVER TOPIC THREADS SECONDS; consume NAME_SERVER TOPIC GROUP MESSAGES BOUND_SECONDS. Prints one JSON
 * object as its last line. A
 * producer warms up for half of its seconds first.
 */
public class StockLoad {
    private static final int BODY_BYTES = 128;

    public static void main(String[] arguments) throws Exception {
        String address = arguments[1];
        String topic = arguments[2];
        if (arguments[0].equals("produce")) {
            produce(address, topic, Integer.parseInt(arguments[3]), Double.parseDouble(arguments[4]));
        } else {
            consume(address, topic, arguments[3], Long.parseLong(arguments[4]), Long.parseLong(arguments[5]));
        }
        System.exit(0);
    }

    private static void produce(String address, String topic, int threads, double seconds) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("versus-producers");
        producer.setNamesrvAddr(address);
        producer.start();
        byte[] body = "x".repeat(BODY_BYTES).getBytes(StandardCharsets.US_ASCII);
        long begun = System.nanoTime();
        long warm = begun + (long) (seconds / 2 * 1e9);
        long end = warm + (long) (seconds * 1e9);
        AtomicLong failures = new AtomicLong();
        AtomicLong sent = new AtomicLong();
        long[][] times = new long[threads][];
        Thread[] running = new Thread[threads];
        for (int n = 0; n < threads; n++) {
            int number = n;
            running[n] = new Thread(() -> {
                long[] own = new long[1024];
                int count = 0;
                for (long before = System.nanoTime(); before < end; before = System.nanoTime()) {
                    try {
                        SendResult result = producer.send(new Message(topic, "TagA", body));
                        if (result.getSendStatus() != SendStatus.SEND_OK) {
                            failures.incrementAndGet();
                            continue;
                        }
                        sent.incrementAndGet();
                    } catch (Exception error) {
                        failures.incrementAndGet();
                        continue;
                    }
                    if (before >= warm) {
                        own = count == own.length ? Arrays.copyOf(own, 2 * count) : own;
                        own[count++] = System.nanoTime() - before;
                    }
                }
                times[number] = Arrays.copyOf(own, count);
            });
            running[n].start();
        }
        for (Thread each : running) {
            each.join();
        }
        long[] all = Arrays.stream(times).flatMapToLong(Arrays::stream).sorted().toArray();
        print(all.length, (System.nanoTime() - warm) / 1e9, sent.get(), failures.get(), at(all, 0.5), at(all, 0.99));
        producer.shutdown();
    }

    private static void consume(String address, String topic, String group, long messages, long bound) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(address);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        AtomicLong came = new AtomicLong();
        AtomicLong first = new AtomicLong();
        CountDownLatch all = new CountDownLatch(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (found, context) -> {
            first.compareAndSet(0, System.nanoTime());
            if (came.addAndGet(found.size()) >= messages) {
                all.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean whole = all.await(bound, TimeUnit.SECONDS);
        double seconds = (System.nanoTime() - first.get()) / 1e9;
        print(came.get(), seconds, came.get(), whole ? came.get() - messages : messages - came.get(), 0, 0);
        consumer.shutdown();
    }

    private static double at(long[] sorted, double share) {
        return sorted.length == 0 ? 0 : sorted[(int) (share * (sorted.length - 1))] / 1e6;
    }

    private static void print(long timed, double seconds, long all, long failures, double p50, double p99) {
        System.out.printf(
            "{\"messages\": %d, \"seconds\": %.6f, \"delivered\": %d, \"failures\": %d, \"p50_ms\": %.4f, \"p99_ms\": %.4f}%n",
            timed, seconds, all, failures, p50, p99);
    }
}
