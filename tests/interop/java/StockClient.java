import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageBatch;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * The stock Java client, driven by JSON lines: requests on stdin, answers and events on stdout.
 *
 * <p>It decides nothing: what to send, when to fail and what must have come is the tests' business. Compiled once for
 * each version of the client; what differs between versions is in Version.java.
 */
public final class StockClient {
    /** Of a request for a route. After its own 3 s the client closes the connection, and so fails its other requests. */
    private static final int API_TIMEOUT_MS = 20_000;

    private static final PrintStream OUT = System.out;
    private static final RPCHook HOOK = hook();
    private final String nameServer;
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();
    private final Map<String, Runnable> stops = new ConcurrentHashMap<>();
    private final Map<String, Integer> failures = new ConcurrentHashMap<>();

    private StockClient(String nameServer) {
        this.nameServer = nameServer;
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err); // what the client prints is no answer
        StockClient client = new StockClient(arguments[0]);
        ExecutorService workers = Executors.newCachedThreadPool();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        emit(Map.of("event", "ready"));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JSONObject request = JSON.parseObject(line);
            workers.execute(() -> client.answer(request));
        }
        System.exit(0);
    }

    /** Signs each request, if the environment says as whom. */
    private static RPCHook hook() {
        String key = System.getenv("STOCK_ACCESS_KEY");
        return key == null ? null
            : new AclClientRPCHook(new SessionCredentials(key, System.getenv("STOCK_SECRET_KEY")));
    }

    private static void emit(Map<String, ?> line) {
        byte[] bytes = (JSON.toJSONString(line) + "\n").getBytes(StandardCharsets.UTF_8);
        synchronized (OUT) {
            OUT.write(bytes, 0, bytes.length);
            OUT.flush();
        }
    }

    private void answer(JSONObject request) {
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
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("type", error.getClass().getSimpleName());
        told.put("text", error.getMessage() + (error.getCause() == null ? "" : ", because of " + error.getCause()));
        if (error instanceof MQBrokerException) {
            told.put("code", ((MQBrokerException) error).getResponseCode());
        } else if (error instanceof MQClientException) {
            told.put("code", ((MQClientException) error).getResponseCode());
        }
        return told;
    }

    private Object perform(JSONObject r) throws Exception {
        switch (r.getString("op")) {
            case "producer": return startProducer(r);
            case "send": return send(r);
            case "request": return request(r);
            case "send_batch": return sendBatch(r);
            case "send_message_batch": return sendMessageBatch(r);
            case "reset_to_time": return Version.resetToTime(nameServer, r.getString("topic"), r.getString("group"),
                r.getLongValue("at_ms"), r.getBooleanValue("force"));
            case "reset_queue": Version.resetQueue(nameServer, r.getString("broker_address"), r.getString("topic"),
                r.getString("group"), r.getIntValue("queue_id"), r.getLongValue("offset")); return null;
            case "send_transaction": return sendTransaction(r);
            case "recall": return Version.recall(producer(r), r.getString("topic"), r.getString("handle"));
            case "consumer": return startConsumer(r);
            case "lite_consumer": return startLiteConsumer(r);
            case "pull": return pull(r);
            case "query_key": return queryKey(r);
            case "view": return told(producer(r).viewMessage(r.getString("topic"), r.getString("message_id")));
            case "offsets": return offsets(r);
            case "stop": stops.remove(r.getString("name")).run(); return null;
            default: throw new IllegalArgumentException(r.getString("op"));
        }
    }

    private DefaultMQProducer producer(JSONObject r) {
        return producers.get(r.getString("producer"));
    }

    // ---- producing

    private Object startProducer(JSONObject r) throws Exception {
        String group = r.getString("group");
        DefaultMQProducer producer;
        if (r.getBooleanValue("transactions")) {
            TransactionMQProducer transactional = new TransactionMQProducer(group, HOOK);
            transactional.setTransactionListener(new Verdicts());
            producer = transactional;
        } else {
            producer = new DefaultMQProducer(group, HOOK, r.getBooleanValue("trace"), null);
        }
        producer.setNamesrvAddr(nameServer);
        producer.setClientIP("127.0.0.1");
        producer.setMqClientApiTimeout(API_TIMEOUT_MS);
        producer.setSendMsgTimeout(20_000);
        producer.start();
        producers.put(r.getString("name"), producer);
        stops.put(r.getString("name"), producer::shutdown);
        return null;
    }

    /** What a transaction comes to: at once by the property "local", when asked later by the property "check". */
    private static final class Verdicts implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return state(message.getProperty("local"));
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            emit(Map.of("event", "check", "message", StockClient.told(message)));
            return state(message.getProperty("check"));
        }

        private static LocalTransactionState state(String name) {
            return LocalTransactionState.valueOf(name == null ? "UNKNOW" : name);
        }
    }

    private static Message message(JSONObject r) throws ReflectiveOperationException {
        Message message = new Message(r.getString("topic"), r.getString("body").getBytes(StandardCharsets.UTF_8));
        if (r.containsKey("tag")) {
            message.setTags(r.getString("tag"));
        }
        if (r.containsKey("keys")) {
            message.setKeys(r.getString("keys"));
        }
        set(message, r);
        return message;
    }

    /** Set a priority, a delay and user properties. */
    private static void set(Message message, JSONObject r) throws ReflectiveOperationException {
        if (r == null) {
            return;
        }
        if (r.containsKey("priority")) { // only clients of 5.4 and later have this
            Message.class.getMethod("setPriority", int.class).invoke(message, r.getIntValue("priority"));
        }
        if (r.containsKey("level")) {
            message.setDelayTimeLevel(r.getIntValue("level"));
        }
        JSONObject properties = r.getJSONObject("properties");
        if (properties != null) {
            properties.forEach((name, value) -> message.putUserProperty(name, String.valueOf(value)));
        }
        if (r.containsKey("timer")) {
            Version.delay(message, r.getString("timer"), r.getLongValue("timer_value"));
        }
    }

    private Object send(JSONObject r) throws Exception {
        Message message = message(r);
        if (r.containsKey("queue_id")) {
            return told(producer(r).send(message, (queues, m, id) -> queues.stream()
                .filter(queue -> queue.getQueueId() == (Integer) id).findFirst().get(), r.getInteger("queue_id")));
        }
        return told(producer(r).send(message));
    }

    /** By the callback: the call that waits is broken in 5.3.1 to 5.3.3 (apache/rocketmq#9292), and always times out. */
    private Object request(JSONObject r) throws Exception {
        CompletableFuture<Message> reply = new CompletableFuture<>();
        producer(r).request(message(r), new RequestCallback() {
            @Override
            public void onSuccess(Message message) {
                if (message != null) { // null says that the request was sent
                    reply.complete(message);
                }
            }

            @Override
            public void onException(Throwable error) {
                reply.completeExceptionally(error);
            }
        }, r.getLongValue("timeout_ms"));
        try {
            return told((MessageExt) reply.get());
        } catch (ExecutionException error) {
            throw (Exception) error.getCause();
        }
    }

    private Object sendBatch(JSONObject r) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (Object one : r.getJSONArray("messages")) {
            messages.add(message((JSONObject) one));
        }
        return told(producer(r).send(messages));
    }

    /** A batch made by hand: "whole" is set on the batch itself, "inner" on its last message, past the client's checks. */
    private Object sendMessageBatch(JSONObject r) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (Object one : r.getJSONArray("messages")) {
            messages.add(message((JSONObject) one));
        }
        MessageBatch batch = MessageBatch.generateFromList(messages);
        messages.forEach(MessageClientIDSetter::setUniqID);
        set(batch, r.getJSONObject("whole"));
        set(messages.get(messages.size() - 1), r.getJSONObject("inner"));
        batch.setBody(batch.encode());
        return told(producer(r).send(batch));
    }

    private Object sendTransaction(JSONObject r) throws Exception {
        return told(((TransactionMQProducer) producer(r)).sendMessageInTransaction(message(r), null));
    }

    private static Map<String, Object> told(SendResult result) {
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("status", result.getSendStatus().name());
        told.put("message_id", result.getMsgId());
        told.put("offset_id", result.getOffsetMsgId());
        told.put("transaction_id", result.getTransactionId());
        told.put("broker", result.getMessageQueue().getBrokerName());
        told.put("queue_id", result.getMessageQueue().getQueueId());
        told.put("queue_offset", result.getQueueOffset());
        told.put("recall_handle", Version.recallHandle(result));
        return told;
    }

    // ---- consuming

    private Object startConsumer(JSONObject r) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
                r.getString("group"), HOOK, new AllocateMessageQueueAveragely(), r.getBooleanValue("trace"), null);
        consumer.setNamesrvAddr(nameServer);
        consumer.setClientIP("127.0.0.1");
        consumer.setMqClientApiTimeout(API_TIMEOUT_MS);
        consumer.setInstanceName(r.getString("name"));
        consumer.setPollNameServerInterval(1_000);
        // 5.x's first heartbeat and its first rebalance may collide, and pulls are refused until the next heartbeat.
        consumer.setHeartbeatBrokerInterval(2_000);
        consumer.setPersistConsumerOffsetInterval(1_000);
        consumer.setConsumeFromWhere(r.getBooleanValue("from_last")
            ? ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET : ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(1);
        if (r.containsKey("threads")) {
            consumer.setConsumeThreadMin(r.getIntValue("threads"));
            consumer.setConsumeThreadMax(r.getIntValue("threads"));
        }
        if (r.containsKey("max_reconsume_times")) {
            consumer.setMaxReconsumeTimes(r.getIntValue("max_reconsume_times"));
        }
        if (r.getBooleanValue("broadcast")) {
            Version.broadcast(consumer);
        }
        if (r.getBooleanValue("server_rebalance")) {
            Version.serverRebalance(consumer);
        }
        if (r.containsKey("sql")) {
            consumer.subscribe(r.getString("topic"), MessageSelector.bySql(r.getString("sql")));
        } else {
            consumer.subscribe(r.getString("topic"), r.getString("expression"));
        }
        if (r.containsKey("reply_by")) {
            replyWith(consumer, r.getString("name"), producers.get(r.getString("reply_by")));
        } else {
            listen(consumer, r);
        }
        consumer.start();
        stops.put(r.getString("name"), consumer::shutdown);
        return null;
    }

    /** Replies to each request with its body and "!", by this producer. */
    private void replyWith(DefaultMQPushConsumer consumer, String name, DefaultMQProducer producer) {
        consumer.setMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt request = messages.get(0);
            try {
                byte[] body = (new String(request.getBody(), StandardCharsets.UTF_8) + "!").getBytes(StandardCharsets.UTF_8);
                producer.send(MessageUtil.createReplyMessage(request, body));
            } catch (Exception error) {
                emit(Map.of("event", "message", "consumer", name, "done", false, "message", told(error)));
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
            received(name, request, 0);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
    }

    private void listen(DefaultMQPushConsumer consumer, JSONObject r) {
        String name = r.getString("name");
        int fail = r.getIntValue("fail");
        int workMs = r.getIntValue("work_ms");
        if (r.getBooleanValue("orderly")) {
            consumer.setMessageListener((MessageListenerOrderly) (messages, context) -> {
                context.setSuspendCurrentQueueTimeMillis(200);
                return received(name, messages.get(0), fail)
                    ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
            });
        } else {
            consumer.setMessageListener((MessageListenerConcurrently) (messages, context) -> {
                boolean done = received(name, messages.get(0), fail);
                work(name, messages.get(0), workMs);
                return done ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
        }
    }

    /** Takes time for a message, and tells of the end. */
    private static void work(String name, MessageExt message, int workMs) {
        if (workMs > 0) {
            LockSupport.parkNanos(workMs * 1_000_000L);
            String body = new String(message.getBody(), StandardCharsets.UTF_8);
            emit(Map.of("event", "end", "consumer", name, "body", body));
        }
    }

    /** Tells of a message; whether its consumer is done with it. The first `fail` deliveries of a body fail. */
    private boolean received(String name, MessageExt message, int fail) {
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        boolean done = failures.merge(name + " " + body, 1, Integer::sum) > fail;
        Map<String, Object> event = new LinkedHashMap<>();
        event.put("event", "message");
        event.put("consumer", name);
        event.put("done", done);
        event.put("message", told(message));
        emit(event);
        return done;
    }

    private Object startLiteConsumer(JSONObject r) throws Exception {
        String name = r.getString("name");
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(r.getString("group"), HOOK);
        consumer.setNamesrvAddr(nameServer);
        consumer.setClientIP("127.0.0.1");
        consumer.setMqClientApiTimeout(API_TIMEOUT_MS);
        consumer.setInstanceName(name);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        consumer.subscribe(r.getString("topic"), r.getString("expression"));
        consumer.start();
        Thread poller = new Thread(() -> {
            while (consumer.isRunning()) {
                List<MessageExt> messages = consumer.poll(500);
                messages.forEach(message -> received(name, message, 0));
                if (!messages.isEmpty()) {
                    consumer.commitSync();
                }
            }
        });
        poller.setDaemon(true);
        poller.start();
        stops.put(name, consumer::shutdown);
        return null;
    }

    private Object pull(JSONObject r) throws Exception {
        DefaultMQPullConsumer consumer = pullConsumer(r);
        try {
            MessageQueue queue = new MessageQueue(r.getString("topic"), r.getString("broker"), r.getIntValue("queue_id"));
            PullResult result = consumer.pull(queue, r.getString("expression"), r.getLongValue("offset"), 32);
            Map<String, Object> told = new LinkedHashMap<>();
            told.put("status", result.getPullStatus().name());
            told.put("next", result.getNextBeginOffset());
            told.put("min", result.getMinOffset());
            told.put("max", result.getMaxOffset());
            List<Object> messages = new ArrayList<>();
            if (result.getMsgFoundList() != null) {
                result.getMsgFoundList().forEach(message -> messages.add(told(message)));
            }
            told.put("messages", messages);
            return told;
        } finally {
            consumer.shutdown();
        }
    }

    private DefaultMQPullConsumer pullConsumer(JSONObject r) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(r.getString("group"), HOOK);
        consumer.setNamesrvAddr(nameServer);
        consumer.setClientIP("127.0.0.1");
        consumer.setMqClientApiTimeout(API_TIMEOUT_MS);
        consumer.start();
        return consumer;
    }

    // ---- asking

    private Object queryKey(JSONObject r) throws Exception {
        QueryResult result = producer(r).queryMessage(r.getString("topic"), r.getString("key"), 32, 0, Long.MAX_VALUE);
        List<Object> messages = new ArrayList<>();
        result.getMessageList().forEach(message -> messages.add(told(message)));
        return messages;
    }

    private Object offsets(JSONObject r) throws Exception {
        DefaultMQProducer producer = producer(r);
        Map<String, Object> told = new TreeMap<>();
        for (MessageQueue queue : producer.fetchPublishMessageQueues(r.getString("topic"))) {
            told.put(String.valueOf(queue.getQueueId()), Map.of(
                "min", producer.minOffset(queue),
                "max", producer.maxOffset(queue),
                "by_time", producer.searchOffset(queue, r.getLongValue("at_ms"))));
        }
        return told;
    }

    private static Map<String, Object> told(MessageExt message) {
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("topic", message.getTopic());
        told.put("body", new String(message.getBody(), StandardCharsets.UTF_8));
        told.put("tag", message.getTags());
        told.put("keys", message.getKeys());
        told.put("message_id", message.getMsgId());
        told.put("queue_id", message.getQueueId());
        told.put("queue_offset", message.getQueueOffset());
        told.put("born_ms", message.getBornTimestamp());
        told.put("store_ms", message.getStoreTimestamp());
        told.put("reconsume_times", message.getReconsumeTimes());
        told.put("properties", message.getProperties());
        return told;
    }
}
