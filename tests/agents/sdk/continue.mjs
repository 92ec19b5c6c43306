// What the editor plug-in Continue asks with, for a provider whose completions take a suffix.
import { constructLlmApi } from "@continuedev/openai-adapters";

const [url, model] = process.argv.slice(2);
const api = constructLlmApi({ provider: "llamastack", apiBase: `${url}/v1/`, apiKey: "none" });
const body = { model, suffix: "\n}\n", max_tokens: 400, temperature: 0.01, stop: ["<|endoftext|>"] };

async function filledIn(prompt, onPiece = () => {}) {
  const control = new AbortController();
  let text = "";
  try {
    for await (const chunk of api.fimStream({ ...body, prompt }, control.signal)) {
      text += chunk.choices[0].delta.content ?? "";
      onPiece(control);
    }
  } catch (error) {
    if (!control.signal.aborted) throw error;
  }
  return text;
}

const text = await filledIn("int f() {\n// [[say return {suffix};]]\n");
const aborted = await filledIn("// [[count]]\n", (control) => control.abort());
console.log(JSON.stringify({ text, aborted: aborted.startsWith("0") }));
