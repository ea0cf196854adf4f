import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** What only this version does so: 5.x has timers, recall and pop. */
final class Version {
    private Version() {
    }

    static void delay(Message message, String property, long value) {
        switch (property) {
            case "TIMER_DELAY_SEC": message.setDelayTimeSec(value); break;
            case "TIMER_DELAY_MS": message.setDelayTimeMs(value); break;
            case "TIMER_DELIVER_MS": message.setDeliverTimeMs(value); break;
            default: throw new IllegalArgumentException(property);
        }
    }

    static void broadcast(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    static void serverRebalance(DefaultMQPushConsumer consumer) {
        consumer.setClientRebalance(false); // the broker's answer then says pull or pop
    }

    static String recall(DefaultMQProducer producer, String topic, String handle) throws Exception {
        return producer.recallMessage(topic, handle);
    }

    /** The administration client's reset: queue to offset. */
    static Object resetToTime(String nameServer, String topic, String group, long atMs, boolean force) throws Exception {
        DefaultMQAdminExt admin = admin(nameServer);
        try {
            Map<String, Long> told = new TreeMap<>();
            admin.resetOffsetByTimestamp(topic, group, atMs, force)
                .forEach((queue, offset) -> told.put(String.valueOf(queue.getQueueId()), offset));
            return told;
        } finally {
            admin.shutdown();
        }
    }

    static void resetQueue(String nameServer, String broker, String topic, String group, int queue, long offset)
            throws Exception {
        DefaultMQAdminExt admin = admin(nameServer);
        try {
            admin.resetOffsetByQueueId(broker, group, topic, queue, offset);
        } finally {
            admin.shutdown();
        }
    }

    private static DefaultMQAdminExt admin(String nameServer) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(nameServer);
        admin.setInstanceName(Long.toString(System.nanoTime()));
        admin.start();
        return admin;
    }

    static String recallHandle(SendResult result) {
        return result.getRecallHandle();
    }
}
