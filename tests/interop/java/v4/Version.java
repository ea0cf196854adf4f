import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;

/** What only this version does so: 4.x knows no timers, so their properties are its user's own. */
final class Version {
    private Version() {
    }

    static void delay(Message message, String property, long value) {
        message.putUserProperty(property, String.valueOf(value));
    }

    static void broadcast(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    static void serverRebalance(DefaultMQPushConsumer consumer) {
        throw new UnsupportedOperationException("4.x consumers do not pop");
    }

    static String recall(DefaultMQProducer producer, String topic, String handle) {
        throw new UnsupportedOperationException("4.x cannot recall");
    }

    static Object resetToTime(String nameServer, String topic, String group, long atMs, boolean force) {
        throw new UnsupportedOperationException("the tools of 4.x are not here");
    }

    static void resetQueue(String nameServer, String broker, String topic, String group, int queue, long offset) {
        throw new UnsupportedOperationException("the tools of 4.x are not here");
    }

    static String recallHandle(SendResult result) {
        return null;
    }
}
