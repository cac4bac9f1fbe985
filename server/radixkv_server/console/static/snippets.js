// One request of the playground as code: curl, openai-python, anthropic-python. Pure functions of its body.

const INDENT = "    ";

/** The three, as [id, label, make(body, {url, hasKey})]. */
export const SNIPPETS = [
  ["curl", "curl", curl],
  ["openai", "openai-python", openaiPython],
  ["anthropic", "anthropic-python", anthropicPython],
];

const base = (url) => url.replace(/\/$/, "");

function curl(body, { url, hasKey }) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl -sN ${base(url)}/v1/chat/completions \\`,
    ...(hasKey ? ['  -H "Authorization: Bearer $RADIXKV_API_KEY" \\'] : []),
    "  -H 'Content-Type: application/json' \\",
    `  -d '${quoted}'`,
  ].join("\n");
}

function openaiPython(body, { url, hasKey }) {
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${base(url)}/v1", api_key=${key(hasKey)})`,
    "stream = client.chat.completions.create(",
    ...fields(body),
    ")",
    "for chunk in stream:",
    "    if chunk.choices and chunk.choices[0].delta.content:",
    '        print(chunk.choices[0].delta.content, end="", flush=True)',
    "    if chunk.usage:",
    "        details = chunk.usage.prompt_tokens_details",
    '        print(f"\\n{details.cached_tokens} of {chunk.usage.prompt_tokens} prompt tokens were cached")',
  ].join("\n");
}

function anthropicPython(body, { url, hasKey }) {
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from anthropic import Anthropic",
    "",
    `client = Anthropic(base_url="${base(url)}", api_key=${key(hasKey)})`,
    "message = client.messages.create(",
    ...fields(messagesBody(body)),
    ")",
    "for block in message.content:",
    '    print(getattr(block, "text", block))',
    'print(message.usage.cache_read_input_tokens, "prompt tokens came from the cache")',
  ].join("\n");
}

const key = (hasKey) => (hasKey ? 'os.environ["RADIXKV_API_KEY"]' : '"none"');

const fields = (body) => Object.entries(body).map(([name, value]) => `${INDENT}${name}=${python(value, INDENT)},`);

/** A JSON value as Python writes it. */
function python(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const inner = indent + INDENT;
  const parts = isList
    ? value.map((item) => python(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, inner)}`);
  const [open, close] = isList ? "[]" : "{}";
  const short = `${open}${parts.join(", ")}${close}`;
  if (short.length + indent.length < 80 && !short.includes("\n")) return short;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}

/**
 * The body of a chat completion as arguments of `messages.create`. There is no seed, and no temperature above 1;
 * newer SDKs take no sampling parameters by name, so these go into `extra_body`.
 */
function messagesBody(body) {
  const system = body.messages.filter((message) => message.role === "system").map((message) => message.content);
  const schema = body.response_format?.json_schema?.schema;
  const made = {
    model: body.model,
    max_tokens: body.max_tokens ?? 1024,
    ...(system.length && { system: system.join("\n") }),
    messages: body.messages.filter((message) => message.role !== "system").map(turn),
  };
  const sampling = {
    ...(body.temperature !== undefined && { temperature: Math.min(1, body.temperature) }),
    ...(body.top_p !== undefined && { top_p: body.top_p }),
  };
  if (body.tools) {
    made.tools = body.tools.map(({ function: { name, description, parameters } }) => ({
      name,
      ...(description && { description }),
      input_schema: parameters ?? { type: "object" },
    }));
  }
  if (schema) made.output_config = { format: { type: "json_schema", schema } };
  if (Object.keys(sampling).length) made.extra_body = sampling;
  return made;
}

function turn(message) {
  if (message.role === "tool") {
    return { role: "user", content: [{ type: "tool_result", tool_use_id: message.tool_call_id, content: message.content }] };
  }
  if (!message.tool_calls) return { role: message.role, content: message.content };
  const calls = message.tool_calls.map(({ id, function: { name, arguments: text } }) => ({ type: "tool_use", id, name, input: parsed(text) }));
  return { role: "assistant", content: [...(message.content ? [{ type: "text", text: message.content }] : []), ...calls] };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}
