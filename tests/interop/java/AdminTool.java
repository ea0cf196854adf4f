import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * RocketMQ's administration tool, driven by JSON lines: the words of one command on stdin, what it printed on stdout.
 *
 * <p>The tool itself runs one command in a process. Its Java takes longer to start than a command takes, and on a busy
 * machine longer than its requests may take.
 */
public final class AdminTool {
    private static final PrintStream OUT = System.out;

    public static void main(String[] args) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        emit(Map.of("event", "ready"));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JSONObject request = JSON.parseObject(line);
            emit(Map.of("id", request.get("id"), "result", run(request.getJSONArray("words").toArray(new String[0]))));
        }
        System.exit(0);
    }

    /** What the command wrote to either stream. It tells of failures by printing them. */
    private static String run(String[] words) throws Exception {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream errors = System.err;
        PrintStream stream = new PrintStream(printed, true, "UTF-8");
        System.setOut(stream);
        System.setErr(stream);
        try {
            MQAdminStartup.main(words);
        } finally {
            System.setOut(OUT);
            System.setErr(errors);
        }
        return printed.toString("UTF-8");
    }

    private static void emit(Map<String, ?> line) {
        byte[] bytes = (JSON.toJSONString(line) + "\n").getBytes(StandardCharsets.UTF_8);
        OUT.write(bytes, 0, bytes.length);
        OUT.flush();
    }
}
