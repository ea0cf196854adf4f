import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.LockSupport;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.ProducerBuilder;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.shaded.com.google.gson.Gson;
import org.apache.rocketmq.shaded.com.google.gson.GsonBuilder;
import org.apache.rocketmq.shaded.com.google.gson.JsonElement;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;

/**
 * The stock Java client for gRPC, driven by JSON lines: requests on stdin, answers and events on stdout.
 *
 * <p>It decides nothing: what to send, when to fail and what must have come is the tests' business.
 */
public final class GrpcClient {
    private static final PrintStream OUT = System.out;
    private static final Gson JSON = new GsonBuilder().serializeNulls().create();
    private static final Pattern CODE = Pattern.compile("response-code=(\\d+)");
    private final String endpoint;
    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final Map<String, Object> running = new ConcurrentHashMap<>();
    private final Map<Integer, MessageView> received = new ConcurrentHashMap<>();
    private final AtomicInteger numbers = new AtomicInteger();
    private final Map<String, Integer> failures = new ConcurrentHashMap<>();

    private GrpcClient(String endpoint) {
        this.endpoint = endpoint;
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err); // what the client prints is no answer
        GrpcClient client = new GrpcClient(arguments[0]);
        ExecutorService workers = Executors.newCachedThreadPool();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        emit(Map.of("event", "ready"));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonObject request = JSON.fromJson(line, JsonObject.class);
            workers.execute(() -> client.answer(request));
        }
        System.exit(0);
    }

    private static void emit(Map<String, ?> line) {
        byte[] bytes = (JSON.toJson(line) + "\n").getBytes(StandardCharsets.UTF_8);
        synchronized (OUT) {
            OUT.write(bytes, 0, bytes.length);
            OUT.flush();
        }
    }

    private void answer(JsonObject request) {
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("id", request.get("id"));
        try {
            answer.put("result", perform(request));
        } catch (Throwable error) { // whatever the client throws is for the test to judge
            answer.put("error", told(error));
        }
        emit(answer);
    }

    private static Map<String, Object> told(Throwable error) {
        String text = String.valueOf(error.getMessage());
        for (Throwable cause = error.getCause(); cause != null; cause = cause.getCause()) {
            text += ", because of " + cause;
        }
        Matcher code = CODE.matcher(text);
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("type", error.getClass().getSimpleName());
        told.put("text", text);
        told.put("code", code.find() ? Integer.valueOf(code.group(1)) : null);
        return told;
    }

    private Object perform(JsonObject r) throws Exception {
        switch (text(r, "op")) {
            case "producer": running.put(text(r, "name"), producer(r)); return null;
            case "send": return told(((Producer) running.get(text(r, "producer"))).send(message(r)));
            case "send_transaction": return sendTransaction(r);
            case "recall": return ((Producer) running.get(text(r, "producer")))
                .recallMessage(text(r, "topic"), text(r, "handle")).getMessageId().toString();
            case "simple": running.put(text(r, "name"), simple(r)); return null;
            case "receive": return receive(r);
            case "ack": consumer(r).ack(received.get(r.get("number").getAsInt())); return null;
            case "change": consumer(r).changeInvisibleDuration(
                received.get(r.get("number").getAsInt()), Duration.ofSeconds(r.get("invisible_s").getAsLong())); return null;
            case "push": running.put(text(r, "name"), push(r)); return null;
            case "stop": ((AutoCloseable) running.remove(text(r, "name"))).close(); return null;
            default: throw new IllegalArgumentException(text(r, "op"));
        }
    }

    private static String text(JsonObject r, String name) {
        JsonElement found = r.get(name);
        return found == null || found.isJsonNull() ? null : found.getAsString();
    }

    private static boolean is(JsonObject r, String name) {
        return r.has(name) && r.get(name).getAsBoolean();
    }

    private ClientConfiguration configuration(JsonObject r) {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder()
            .setEndpoints(r.has("endpoint") ? text(r, "endpoint") : endpoint)
            .setRequestTimeout(Duration.ofSeconds(10))
            .enableSsl(is(r, "tls"));
        if (r.has("access_key")) {
            builder.setCredentialProvider(
                new StaticSessionCredentialsProvider(text(r, "access_key"), text(r, "secret_key")));
        }
        return builder.build();
    }

    private static Map<String, FilterExpression> subscription(JsonObject r) {
        FilterExpression expression = r.has("sql")
            ? new FilterExpression(text(r, "sql"), FilterExpressionType.SQL92)
            : new FilterExpression(r.has("expression") ? text(r, "expression") : "*");
        return Map.of(text(r, "topic"), expression);
    }

    // ---- producing

    private Producer producer(JsonObject r) throws Exception {
        ProducerBuilder builder = provider.newProducerBuilder().setClientConfiguration(configuration(r));
        if (r.has("topic")) {
            builder.setTopics(text(r, "topic"));
        }
        if (is(r, "transactions")) {
            builder.setTransactionChecker(half -> {
                emit(Map.of("event", "check", "message", told(half)));
                return resolution(half.getProperties().get("check"));
            });
        }
        return builder.build();
    }

    private static TransactionResolution resolution(String name) {
        return TransactionResolution.valueOf(name);
    }

    private Message message(JsonObject r) {
        MessageBuilder builder = provider.newMessageBuilder()
            .setTopic(text(r, "topic")).setBody(text(r, "body").getBytes(StandardCharsets.UTF_8));
        if (r.has("tag")) {
            builder.setTag(text(r, "tag"));
        }
        if (r.has("keys")) {
            builder.setKeys(text(r, "keys"));
        }
        if (r.has("message_group")) {
            builder.setMessageGroup(text(r, "message_group"));
        }
        if (r.has("due_ms")) {
            builder.setDeliveryTimestamp(r.get("due_ms").getAsLong());
        }
        if (r.has("properties")) {
            r.getAsJsonObject("properties").entrySet()
                .forEach(one -> builder.addProperty(one.getKey(), one.getValue().getAsString()));
        }
        return builder.build();
    }

    private Object sendTransaction(JsonObject r) throws Exception {
        Producer producer = (Producer) running.get(text(r, "producer"));
        Transaction transaction = producer.beginTransaction();
        SendReceipt receipt = producer.send(message(r), transaction);
        switch (resolution(text(r, "local"))) {
            case COMMIT: transaction.commit(); break;
            case ROLLBACK: transaction.rollback(); break;
            default: break;
        }
        return told(receipt);
    }

    private static Map<String, Object> told(SendReceipt receipt) {
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("message_id", receipt.getMessageId().toString());
        told.put("recall_handle", receipt.getRecallHandle());
        return told;
    }

    // ---- consuming

    private SimpleConsumer simple(JsonObject r) throws Exception {
        return provider.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration(r))
            .setConsumerGroup(text(r, "group"))
            .setAwaitDuration(Duration.ofSeconds(r.get("wait_s").getAsLong()))
            .setSubscriptionExpressions(subscription(r))
            .build();
    }

    private SimpleConsumer consumer(JsonObject r) {
        return (SimpleConsumer) running.get(text(r, "consumer"));
    }

    private Object receive(JsonObject r) throws Exception {
        List<Object> found = new ArrayList<>();
        Duration invisible = Duration.ofSeconds(r.get("invisible_s").getAsLong());
        for (MessageView message : consumer(r).receive(r.get("count").getAsInt(), invisible)) {
            int number = numbers.incrementAndGet();
            received.put(number, message);
            Map<String, Object> told = told(message);
            told.put("number", number);
            told.put("received_ms", System.currentTimeMillis());
            found.add(told);
        }
        return found;
    }

    private PushConsumer push(JsonObject r) throws Exception {
        String name = text(r, "name");
        int fail = r.has("fail") ? r.get("fail").getAsInt() : 0;
        int workMs = r.has("work_ms") ? r.get("work_ms").getAsInt() : 0;
        return provider.newPushConsumerBuilder()
            .setClientConfiguration(configuration(r))
            .setConsumerGroup(text(r, "group"))
            .setSubscriptionExpressions(subscription(r))
            .setMessageListener(message -> received(name, message, fail, is(r, "hold"), workMs))
            .build();
    }

    /** Tells of a message, and of the end of work on it. The first `fail` deliveries of a body fail. Who holds never ends. */
    private ConsumeResult received(String name, MessageView message, int fail, boolean hold, int workMs) {
        Map<String, Object> what = told(message);
        boolean done = failures.merge(name + " " + what.get("body"), 1, Integer::sum) > fail;
        emit(Map.of("event", "message", "consumer", name, "done", done, "message", what));
        while (hold) {
            LockSupport.park();
        }
        if (workMs > 0) {
            LockSupport.parkNanos(workMs * 1_000_000L);
            emit(Map.of("event", "end", "consumer", name, "body", what.get("body")));
        }
        return done ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
    }

    private static Map<String, Object> told(MessageView message) {
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("topic", message.getTopic());
        told.put("body", StandardCharsets.UTF_8.decode(message.getBody()).toString());
        told.put("tag", message.getTag().orElse(null));
        told.put("keys", new TreeSet<>(message.getKeys()));
        told.put("message_id", message.getMessageId().toString());
        told.put("born_ms", message.getBornTimestamp());
        told.put("due_ms", message.getDeliveryTimestamp().orElse(null));
        told.put("message_group", message.getMessageGroup().orElse(null));
        told.put("attempt", message.getDeliveryAttempt());
        told.put("properties", message.getProperties());
        return told;
    }
}
